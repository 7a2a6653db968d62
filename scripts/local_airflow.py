"""A real Airflow on loopback, as child processes: for ``make up``, the demo and the tests.

Not ``airflow standalone``, which leaves its children running when it is terminated, and does not
notice the death of a component.  Here every component is a separate process with a log file, and
:meth:`LocalAirflow.stop` ends all processes, including those that tasks have started: all inherit a
token in their environment.  By that token, the next start on the same AIRFLOW_HOME ends the
processes that a killed predecessor left.
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
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from scripts.airflow_api import FINISHED, AirflowApi, ApiError, LocalAirflowError
from scripts.airflow_env import DEFAULT_PORT

__all__ = [
    "COMPONENTS",
    "FINISHED",
    "TOKEN_VARIABLE",
    "ApiError",
    "LocalAirflow",
    "LocalAirflowError",
    "end_leftovers",
    "free_port",
    "kill_by_token",
    "processes_with",
]

#: Airflow's components, and the arguments of ``airflow`` that start them.  Without log servers,
#: which would listen on every address: logs are on the shared disk.
COMPONENTS: Mapping[str, Sequence[str]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}

#: The names of the components in ``/api/v2/monitor/health``.
_HEALTH = {
    "api-server": "metadatabase",
    "scheduler": "scheduler",
    "dag-processor": "dag_processor",
    "triggerer": "triggerer",
}

#: The environment variable with the token of a :class:`LocalAirflow`.
TOKEN_VARIABLE = "BROADWAY_LOCAL_AIRFLOW"


def free_port(preferred: int = 0) -> int:
    """Returns ``preferred`` if nothing listens on it, else the next free one; any free one if 0."""
    for port in range(preferred, preferred + 100) if preferred else (0,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LocalAirflowError(f"No free port from {preferred} to {preferred + 99}.")


class LocalAirflow(AirflowApi):
    """Starts and stops an Airflow; as a context manager, it is healthy inside.

    :param env: The complete environment from :func:`scripts.airflow_env.airflow_env`, with the
        port.
    :param log_dir: The folder of the logs, ``<component>.log``.
    :param components: The :data:`COMPONENTS` to start.
    :param login: User name and password for the API; ``None`` if every client is an administrator.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        log_dir: Path,
        *,
        components: Sequence[str] = tuple(COMPONENTS),
        login: tuple[str, str] | None = None,
    ) -> None:
        self.token = secrets.token_hex(16)
        self.env = {
            **env,
            TOKEN_VARIABLE: self.token,
            "PYTHONUNBUFFERED": "1",
            # Changing the process title would overwrite the environment with the token.
            "SPT_NOENV": "1",
        }
        self.home = Path(env["AIRFLOW_HOME"])
        self.port = int(env.get("AIRFLOW__API__PORT", DEFAULT_PORT))
        super().__init__(f"http://127.0.0.1:{self.port}", login=login)
        self.log_dir = log_dir
        self.components = tuple(components)
        self._started: dict[str, datetime] = {}
        #: The running components, by name.
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock: IO[str] | None = None

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
        """Migrates the metadata database if necessary and starts all components without waiting.

        :raises LocalAirflowError: Another local Airflow uses this AIRFLOW_HOME, the port is in use,
            or the database cannot be migrated.
        """
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._take_home()
        if free_port(self.port) != self.port:
            raise LocalAirflowError(f"Port {self.port} is taken.")
        self.migrate()
        for name in self.components:
            self.start_component(name)

    def migrate(self) -> None:
        """Creates or upgrades the metadata database, once per version of Airflow."""
        version = metadata.version("apache-airflow-core")
        stamp = self.home / "migrated"
        if (
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN" not in self.env
            and (self.home / "airflow.db").exists()
            and stamp.exists()
            and stamp.read_text() == version
        ):
            return
        self.log_dir.mkdir(parents=True, exist_ok=True)
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
            raise self._failure("Airflow's database could not be migrated", "migrate")
        stamp.write_text(version)

    def start_component(self, name: str) -> None:
        """Starts a component in a new session, so that Ctrl-C in a terminal does not reach it."""
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
        """Waits until every component reports itself healthy.

        :raises LocalAirflowError: A component ended, or ``timeout`` seconds passed.
        """
        health: dict[str, str] = {}

        def healthy() -> bool:
            health.update(self.health())
            return all(health.get(name) == "healthy" for name in self.components)

        self._wait(healthy, timeout, lambda: f"Airflow is not healthy: {health}", "api-server")

    def health(self) -> dict[str, str]:
        """Returns each component's reported health; ``"no answer"`` if the API does not respond."""
        if not self._listens():  # another Airflow may use the port by now
            return dict.fromkeys(self.components, "no answer")
        try:
            with urllib.request.urlopen(f"{self.url}/api/v2/monitor/health", timeout=10) as reply:
                health_ = json.load(reply)
        except (OSError, http.client.HTTPException, ValueError):
            return dict.fromkeys(self.components, "no answer")
        return {
            name: self._health_of(name, health_.get(_HEALTH[name]) or {}) for name in self._started
        }

    def _listens(self) -> bool:
        """Returns whether a process of our API server listens on the port."""
        try:
            server = psutil.Process(self.processes["api-server"].pid)
            return any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port
                for process in (server, *server.children(recursive=True))
                for connection in process.net_connections("tcp")
            )
        except (KeyError, psutil.Error):
            return False

    def _health_of(self, name: str, part: Mapping[str, Any]) -> str:
        beat = part.get(f"latest_{_HEALTH[name]}_heartbeat")
        # Airflow accepts a heartbeat of the last 30 seconds, which may be a predecessor's.
        if beat is not None and datetime.fromisoformat(beat) < self._started[name]:
            return "starting"
        return str(part.get("status"))

    def check_alive(self) -> None:
        """Checks that no component has ended.

        :raises LocalAirflowError: Naming the component, with the end of its log.
        """
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise self._failure(f"{name} ended with code {process.returncode}", name)

    def stop(self, grace: float = 5.0) -> None:
        """Stops every component and everything they have started.  Safe to repeat.

        Sends SIGTERM, and SIGKILL after ``grace`` seconds.
        """
        try:
            deadline = time.monotonic() + grace
            # The API server is last, so that running tasks can still report.
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
        """Kills every component and everything they have started, without SIGTERM."""
        kill_by_token(self.token)
        for process in self.processes.values():
            process.wait()
        self.processes.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def processes_of_tasks(self) -> list[psutil.Process]:
        """Returns all processes of this Airflow except the components."""
        components = {process.pid for process in self.processes.values()}
        return [found for found in processes_with(self.token) if found.pid not in components]

    # ---------------------------------------------------------------------------------- details
    def component_log(self, name: str, lines: int = 30) -> str:
        """Returns the last ``lines`` lines of a component's log."""
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

    def _take_home(self) -> None:
        """Locks the home against other local Airflows."""
        lock = _lock_home(self.home)
        if lock is None:
            lines = (self.home / _LOCK).read_text().split()
            where = f" at {lines[1]}, process {lines[2]}" if len(lines) == 3 else ""
            raise LocalAirflowError(f"An Airflow runs on {self.home} already{where}.")
        lock.write(f"{self.token} {self.url} {os.getpid()}")
        lock.flush()
        self._lock = lock


#: The lock file in AIRFLOW_HOME; contains the running Airflow's token, URL and process id.
_LOCK = "local_airflow.lock"


def _lock_home(home: Path) -> IO[str] | None:
    """Locks ``home`` and ends leftover processes; returns ``None`` if an Airflow runs there."""
    home.mkdir(parents=True, exist_ok=True)
    lock = (home / _LOCK).open("a+")
    try:
        # The kernel releases the lock when the process ends; children do not inherit it.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    lock.seek(0)
    if result := lock.read().split():
        kill_by_token(result[0])
    lock.truncate(0)
    return lock


def end_leftovers(home: Path) -> None:
    """Ends the processes that a killed :class:`LocalAirflow` left, which frees its port."""
    lock = _lock_home(home)
    if lock is not None:
        lock.close()


def processes_with(
    token: str, *, variable: str = TOKEN_VARIABLE, spared: Sequence[str] = ()
) -> list[psutil.Process]:
    """Returns all running processes with this token in their environment.

    :param spared: Names of programs to skip.
    """
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.environ().get(variable) != token:
                continue
            if process.name() not in spared:
                processes.append(process)
    return processes


def kill_by_token(
    token: str, timeout: float = 10.0, *, variable: str = TOKEN_VARIABLE, spared: Sequence[str] = ()
) -> None:
    """Kills all processes with this token; repeats, because one may fork at the same time."""
    deadline = time.monotonic() + timeout
    while (
        found := processes_with(token, variable=variable, spared=spared)
    ) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=1.0)


def _airflow() -> list[str]:
    # Not the script in bin/, whose first line breaks when the checkout is moved.
    return [sys.executable, "-m", "airflow"]


def main() -> None:
    """Creates the metadata database of the environment's AIRFLOW_HOME."""
    home = Path(os.environ["AIRFLOW_HOME"])
    LocalAirflow(os.environ, home / "logs" / "components").migrate()


if __name__ == "__main__":
    main()
