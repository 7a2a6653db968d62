"""A real Airflow on loopback, as child processes: for ``make up``, the demo and the tests.

``airflow standalone`` is not used: terminated, it leaves its children behind, and a component of it
that dies is never missed.  Here every component is a process of its own whose log is a file, and
:meth:`LocalAirflow.stop` leaves nothing behind, not even what tasks have started: every process
gets a token in its environment, which its descendants inherit wherever they go.  The next start on
the same AIRFLOW_HOME ends by that token what a killed predecessor could not.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from scripts.airflow_env import DEFAULT_PORT

#: What an Airflow consists of, and the arguments of ``airflow`` that start it.  Logs are read from
#: the disk that all share, so no component serves them: those servers listen on every address.
COMPONENTS: Mapping[str, Sequence[str]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}

#: The components in the words of ``/api/v2/monitor/health``.
_HEALTH = {
    "api-server": "metadatabase",
    "scheduler": "scheduler",
    "dag-processor": "dag_processor",
    "triggerer": "triggerer",
}

#: Carried by every process of one :class:`LocalAirflow`.
TOKEN_VARIABLE = "BROADWAY_LOCAL_AIRFLOW"

#: States in which a DAG run is over.
FINISHED = frozenset({"success", "failed"})


class LocalAirflowError(RuntimeError):
    """Airflow did not do what was asked of it; the message ends with the log that tells why."""


class ApiError(LocalAirflowError):
    """The REST API answered with an error."""

    def __init__(self, method: str, path: str, status: int, body: str) -> None:
        super().__init__(f"{method} {path}: {status} {body}")
        self.status = status


def free_port(preferred: int = 0) -> int:
    """Return ``preferred`` if nothing listens on it, else the next free one; any free one if 0."""
    for port in range(preferred, preferred + 100) if preferred else (0,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LocalAirflowError(f"No free port from {preferred} to {preferred + 99}.")


class LocalAirflow:
    """One Airflow, started and stopped; as a context manager, started and healthy inside.

    :param env: The whole environment of its processes, from
        :func:`scripts.airflow_env.airflow_env`.  The port is taken from it.
    :param log_dir: Where each component writes ``<component>.log``.
    :param components: Which of :data:`COMPONENTS` to start.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        log_dir: Path,
        *,
        components: Sequence[str] = tuple(COMPONENTS),
    ) -> None:
        self.token = secrets.token_hex(16)
        self.env = {
            **env,
            TOKEN_VARIABLE: self.token,
            "PYTHONUNBUFFERED": "1",
            # A process that changes its title must not write over its environment: see the token.
            "SPT_NOENV": "1",
        }
        self.home = Path(env["AIRFLOW_HOME"])
        self.port = int(env.get("AIRFLOW__API__PORT", DEFAULT_PORT))
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_dir = log_dir
        self.components = tuple(components)
        self._started: dict[str, datetime] = {}
        #: The running components, by name.
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock: IO[str] | None = None
        self._jwt: str | None = None

    # ------------------------------------------------------------------------------------- life
    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Prepare the metadata database if needed and start every component, without waiting.

        :raises LocalAirflowError: Another Airflow of ours runs on this AIRFLOW_HOME, the port is
            taken, or the database cannot be made.
        """
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._take_home()
        if free_port(self.port) != self.port:
            raise LocalAirflowError(f"Port {self.port} is taken.")
        self.migrate()
        for name in self.components:
            self.start_component(name)

    def migrate(self) -> None:
        """Make or upgrade the metadata database, once for each version of Airflow."""
        version = metadata.version("apache-airflow-core")
        stamp = self.home / "migrated"
        if (
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN" not in self.env
            and (self.home / "airflow.db").exists()
            and stamp.exists()
            and stamp.read_text() == version
        ):
            return
        with self._log("migrate").open("wb") as log:
            code = subprocess.run(
                [*_airflow(), "db", "migrate"],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if code:
            raise self._failure("Airflow's database could not be made", "migrate")
        stamp.write_text(version)

    def start_component(self, name: str) -> None:
        """Start one component, in a session of its own: a terminal's Ctrl-C must not reach it."""
        self._started[name] = datetime.now(UTC)
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*_airflow(), *COMPONENTS[name]],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_healthy(self, timeout: float = 120.0) -> None:
        """Wait until every component reports itself healthy.

        :raises LocalAirflowError: A component ended, or ``timeout`` seconds passed.
        """
        health: dict[str, str] = {}

        def healthy() -> bool:
            self.check_alive()
            health.update(self.health())
            return all(health.get(name) == "healthy" for name in self.components)

        with self._explain("api-server"):
            _wait(healthy, timeout, lambda: f"Airflow is not healthy: {health}")

    def health(self) -> dict[str, str]:
        """Return each component's health in its own word, or ``"no answer"`` for all."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v2/monitor/health", timeout=10) as reply:
                told = json.load(reply)
        except (OSError, http.client.HTTPException, ValueError):
            return dict.fromkeys(self.components, "no answer")
        return {
            name: self._health_of(name, told.get(_HEALTH[name]) or {}) for name in self._started
        }

    def _health_of(self, name: str, part: Mapping[str, Any]) -> str:
        beat = part.get(f"latest_{_HEALTH[name]}_heartbeat")
        # Airflow takes a heartbeat of the last 30 seconds for health: it may be a predecessor's.
        if beat is not None and datetime.fromisoformat(beat) < self._started[name]:
            return "starting"
        return str(part.get("status"))

    def check_alive(self) -> None:
        """Check that no component has ended.

        :raises LocalAirflowError: Naming the component, with the end of its log.
        """
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise self._failure(f"{name} ended with code {process.returncode}", name)

    def stop(self, grace: float = 5.0) -> None:
        """Stop every component and everything they have started.  Safe to repeat.

        First asked (SIGTERM), then, after ``grace`` seconds or when asked in vain, killed.
        """
        try:
            deadline = time.monotonic() + grace
            # The API server goes last: while it stands, running tasks can still report.
            self._terminate([name for name in self.processes if name != "api-server"], deadline)
            self._terminate(list(self.processes), max(deadline, time.monotonic() + 2.0))
        finally:
            self.kill()

    def _terminate(self, names: Sequence[str], deadline: float) -> None:
        for name in names:
            self.processes[name].terminate()
        for name in names:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kill every component and everything they have started, at once."""
        kill_by_token(self.token)
        for process in self.processes.values():
            process.wait()
        self.processes.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -------------------------------------------------------------------------------------- API
    def api(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Call ``/api/v2`` + ``path`` and return the JSON of its answer, ``None`` if it is empty.

        :raises ApiError: The answer's status is 400 or higher.
        """
        url = f"{self.url}/api/v2{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query, doseq=True)
        if self._jwt is None:
            self._jwt = self._log_in()
        try:
            return _call(method, url, body, self._jwt)
        except ApiError as error:
            if error.status != http.client.UNAUTHORIZED:
                raise
        self._jwt = self._log_in()
        return _call(method, url, body, self._jwt)

    def _log_in(self) -> str:
        # With "all are administrators" a GET hands out a token, and nobody has a password to POST.
        return str(_call("GET", f"{self.url}/auth/token", None, None)["access_token"])

    def wait_for_dag(self, dag_id: str, timeout: float = 60.0) -> dict[str, Any]:
        """Wait until the DAG processor has found ``dag_id``; return the API's description of it."""
        found: dict[str, Any] = {}

        def known() -> bool:
            self.check_alive()
            try:
                found.update(self.api("GET", f"/dags/{_quote(dag_id)}"))
            except ApiError as error:
                if error.status != http.client.NOT_FOUND:
                    raise
            return bool(found)

        def complaint() -> str:
            errors = self.api("GET", "/importErrors")["import_errors"]
            return f"No DAG {dag_id!r}; import errors: " + (
                "\n".join(f"{error['filename']}:\n{error['stack_trace']}" for error in errors)
                or "none"
            )

        with self._explain("dag-processor"):
            _wait(known, timeout, complaint)
        return found

    def trigger(
        self,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        logical_date: datetime | None = None,
    ) -> str:
        """Start a run of ``dag_id`` and return its run id."""
        body = {
            "conf": dict(conf or {}),
            "dag_run_id": run_id,
            "logical_date": logical_date.astimezone(UTC).isoformat() if logical_date else None,
        }
        run = self.api("POST", f"/dags/{_quote(dag_id)}/dagRuns", body)
        return str(run["dag_run_id"])

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Return the API's description of a run."""
        return dict(self.api("GET", _run(dag_id, run_id)))

    def wait_for_run(self, dag_id: str, run_id: str, timeout: float = 300.0) -> str:
        """Wait until the run is over and return its state, ``success`` or ``failed``."""
        state = ""

        def over() -> bool:
            nonlocal state
            self.check_alive()
            state = str(self.dag_run(dag_id, run_id)["state"])
            return state in FINISHED

        def complaint() -> str:
            tasks = {
                f"{task['task_id']}[{task['map_index']}]": task["state"]
                for task in self.task_instances(dag_id, run_id)
            }
            return f"The run {run_id!r} of {dag_id!r} is still {state!r}; its tasks: {tasks}"

        with self._explain("scheduler"):
            _wait(over, timeout, complaint)
        return state

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return the API's descriptions of a run's task instances, mapped ones each for itself."""
        answer = self.api("GET", _run(dag_id, run_id) + "/taskInstances", limit=1000)
        return list(answer["task_instances"])

    def task_instance(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1
    ) -> dict[str, Any]:
        """Return the API's description of one task instance."""
        return dict(self.api("GET", _task(dag_id, run_id, task_id, map_index)))

    def wait_for_task(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        states: Sequence[str | None] = ("success",),
        *,
        map_index: int = -1,
        timeout: float = 120.0,
    ) -> dict[str, Any]:
        """Wait until a task instance is in one of ``states``; return the API's description of it.

        A mapped task instance that is not made yet counts as one without a state.
        """
        found: dict[str, Any] = {}

        def there() -> bool:
            self.check_alive()
            try:
                found.update(self.task_instance(dag_id, run_id, task_id, map_index))
            except ApiError as error:
                if error.status != http.client.NOT_FOUND:
                    raise
            return bool(found) and found["state"] in states

        with self._explain("scheduler"):
            _wait(there, timeout, lambda: f"{task_id}[{map_index}] is still {found.get('state')!r}")
        return found

    def clear(
        self,
        dag_id: str,
        run_id: str,
        task_ids: Sequence[str | tuple[str, int]],
        *,
        downstream: bool = False,
        upstream: bool = False,
        only_failed: bool = False,
    ) -> list[dict[str, Any]]:
        """Clear tasks as the UI does; return what was cleared.

        :param task_ids: Task ids, or pairs of task id and map index.
        """
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [task if isinstance(task, str) else list(task) for task in task_ids],
            "include_downstream": downstream,
            "include_upstream": upstream,
            "only_failed": only_failed,
        }
        answer = self.api("POST", f"/dags/{_quote(dag_id)}/clearTaskInstances", body)
        return list(answer["task_instances"])

    def set_state(
        self, dag_id: str, run_id: str, task_id: str, state: str, *, map_index: int = -1
    ) -> None:
        """Mark a task instance ``success``, ``failed`` or ``skipped``, as the UI does."""
        self.api("PATCH", _task(dag_id, run_id, task_id, map_index), {"new_state": state})

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark a whole run ``success``, ``failed`` or ``queued``, as the UI does."""
        self.api("PATCH", _run(dag_id, run_id), {"state": state})

    def delete_run(self, dag_id: str, run_id: str) -> None:
        """Delete a run, as the UI does."""
        self.api("DELETE", _run(dag_id, run_id))

    def pause(self, dag_id: str, paused: bool = True) -> None:
        """Pause a DAG, or let it go on."""
        self.api("PATCH", f"/dags/{_quote(dag_id)}", {"is_paused": paused})

    def xcom(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        key: str = "return_value",
        *,
        map_index: int = -1,
    ) -> Any:
        """Return the value of an XCom.

        :raises ApiError: With status 404 if there is none.
        """
        path = f"{_run(dag_id, run_id)}/taskInstances/{_quote(task_id)}/xcomEntries/{_quote(key)}"
        return self.api("GET", path, map_index=map_index, deserialize=False)["value"]

    def task_log(
        self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, *, map_index: int = -1
    ) -> str:
        """Return what one try of a task instance has logged, a line for an event."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{_quote(task_id)}/logs/{try_number}"
        content = self.api("GET", path, map_index=map_index, full_content=True)["content"]
        return "\n".join(
            line if isinstance(line, str) else f"{line.get('timestamp') or ''} {line['event']}"
            for line in content
        )

    def processes_of_tasks(self) -> list[psutil.Process]:
        """Return every process of this Airflow that is not a component itself, e.g. to kill one."""
        components = {process.pid for process in self.processes.values()}
        return [found for found in processes_with(self.token) if found.pid not in components]

    # ---------------------------------------------------------------------------------- details
    def component_log(self, name: str, lines: int = 30) -> str:
        """Return the last ``lines`` lines that a component wrote."""
        try:
            text = self._log(name).read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _log(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def _failure(self, what: str, log: str) -> LocalAirflowError:
        end = self.component_log(log)
        return LocalAirflowError(f"{what}.  The end of {self._log(log)}:\n{end}")

    @contextlib.contextmanager
    def _explain(self, log: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise self._failure(str(error), log) from None

    def _take_home(self) -> None:
        """Make this the only Airflow on its home, and end what a killed one left running."""
        self.home.mkdir(parents=True, exist_ok=True)
        lock = (self.home / "local_airflow.lock").open("a+")
        try:
            # The kernel releases it with the process, however that dies; no child inherits it.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            told = lock.read().split()
            lock.close()
            where = f" at {told[1]}, process {told[2]}" if len(told) == 3 else ""
            raise LocalAirflowError(f"An Airflow runs on {self.home} already{where}.") from None
        lock.seek(0)
        if told := lock.read().split():
            kill_by_token(told[0])
        lock.seek(0)
        lock.truncate()
        lock.write(f"{self.token} {self.url} {os.getpid()}")
        lock.flush()
        self._lock = lock


def processes_with(token: str) -> list[psutil.Process]:
    """Return every living process that carries ``token``, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(TOKEN_VARIABLE) == token:
                found.append(process)
    return found


def kill_by_token(token: str, timeout: float = 10.0) -> None:
    """Kill every process that carries ``token``, until none is left: one may just be forking."""
    deadline = time.monotonic() + timeout
    while (found := processes_with(token)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=1.0)


def _airflow() -> list[str]:
    # Not the script in the environment's bin: its first line breaks when the checkout is moved.
    return [sys.executable, "-m", "airflow"]


def _wait(done: Callable[[], bool], timeout: float, complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{complaint()}, after {timeout:g} s")
        time.sleep(0.25)


def _call(method: str, url: str, body: Any, token: str | None) -> Any:
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            content = reply.read()
    except urllib.error.HTTPError as error:
        raise ApiError(method, url, error.code, error.read().decode(errors="replace")) from None
    return json.loads(content) if content else None


def _quote(part: str) -> str:
    return urllib.parse.quote(part, safe="")


def _run(dag_id: str, run_id: str) -> str:
    return f"/dags/{_quote(dag_id)}/dagRuns/{_quote(run_id)}"


def _task(dag_id: str, run_id: str, task_id: str, map_index: int) -> str:
    path = f"{_run(dag_id, run_id)}/taskInstances/{_quote(task_id)}"
    return path if map_index < 0 else f"{path}/{map_index}"


def main() -> None:
    """Make the metadata database of the AIRFLOW_HOME that the environment names."""
    home = Path(os.environ["AIRFLOW_HOME"])
    LocalAirflow(os.environ, home / "logs" / "components").migrate()


if __name__ == "__main__":
    main()
