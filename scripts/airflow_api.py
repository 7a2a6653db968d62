"""A client of Airflow's REST API for scripts and tests: the actions of the UI, and waits.

Standard library only.  Every method raises :class:`ApiError` if the API responds with an error.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

#: States in which a DAG run is over.
FINISHED = frozenset({"success", "failed"})


class LocalAirflowError(RuntimeError):
    """An operation of Airflow failed; the message has the reason and the end of a log."""


class ApiError(LocalAirflowError):
    """The REST API responded with an error."""

    def __init__(self, method: str, path: str, status: int, body: str) -> None:
        super().__init__(f"{method} {path}: {status} {body}")
        self.status = status
        #: Whether the database failed the request, such as a locked SQLite; it had no effect.
        self.undone = status == http.client.INTERNAL_SERVER_ERROR and "Database error" in body


class AirflowApi:
    """The API of the Airflow at ``url``.

    :param login: A user's name and password; ``None`` where every client is an administrator.
    """

    def __init__(self, url: str, *, login: tuple[str, str] | None = None) -> None:
        self.url = url
        self._login = login
        self._jwt: str | None = None

    def check_alive(self) -> None:
        """Called repeatedly while waiting; raises if waiting is pointless."""

    def _failure(self, what: str, log: str) -> LocalAirflowError:
        """Returns the error to raise; ``log`` may contain the reason."""
        return LocalAirflowError(what)

    def _wait(
        self,
        done: Callable[[], bool],
        timeout: float,
        describe_failure: Callable[[], str],
        log: str,
    ) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self.check_alive()
            if done():
                return
            if time.monotonic() >= deadline:
                raise self._failure(f"{describe_failure()}, after {timeout:g} s", log)
            time.sleep(0.5)  # limits the load of the API server

    def api(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Calls ``/api/v2`` + ``path``; returns the JSON of the response, ``None`` if it is empty.

        :raises ApiError: The status is 400 or higher.
        """
        url = f"{self.url}/api/v2{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query, doseq=True)
        for _ in range(2):
            try:
                return self._request(method, url, body)
            except ApiError as error:
                if error.status == http.client.UNAUTHORIZED:
                    self._jwt = None
                elif not error.undone:
                    raise
        return self._request(method, url, body)

    def _request(self, method: str, url: str, body: Any) -> Any:
        if self._jwt is None:
            self._jwt = self.token_for(self._login)
        return _call(method, url, body, self._jwt)

    def token_for(self, login: tuple[str, str] | None) -> str:
        """Logs in; returns the access token."""
        if login is None:
            # Without users, a GET returns a token of an administrator.
            response = _call("GET", f"{self.url}/auth/token", None, None)
        else:
            body = dict(zip(("username", "password"), login, strict=True))
            response = _call("POST", f"{self.url}/auth/token", body, None)
        return str(response["access_token"])

    def wait_for_dag(self, dag_id: str, timeout: float = 60.0) -> dict[str, Any]:
        """Waits until the DAG processor has parsed ``dag_id``; returns the DAG as JSON."""
        details: dict[str, Any] = {}

        def is_parsed() -> bool:
            try:
                details.update(self.api("GET", f"/dags/{_quote(dag_id)}"))
            except ApiError as error:
                if error.status != http.client.NOT_FOUND:
                    raise
            return bool(details)

        def describe_failure() -> str:
            errors = self.api("GET", "/importErrors")["import_errors"]
            return f"No DAG {dag_id!r}; import errors: " + (
                "\n".join(f"{error['filename']}:\n{error['stack_trace']}" for error in errors)
                or "none"
            )

        self._wait(is_parsed, timeout, describe_failure, "dag-processor")
        return details

    def trigger(
        self,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        logical_date: datetime | None = None,
    ) -> str:
        """Starts a run of ``dag_id`` and returns its run id."""
        body = {
            "conf": dict(conf or {}),
            "dag_run_id": run_id,
            "logical_date": logical_date.astimezone(UTC).isoformat() if logical_date else None,
        }
        run = self.api("POST", f"/dags/{_quote(dag_id)}/dagRuns", body)
        return str(run["dag_run_id"])

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Returns a run as JSON."""
        return dict(self.api("GET", _run(dag_id, run_id)))

    def wait_for_run(self, dag_id: str, run_id: str, timeout: float = 300.0) -> str:
        """Waits until the run is over and returns its state, ``success`` or ``failed``."""
        state = ""

        def is_over() -> bool:
            nonlocal state
            state = str(self.dag_run(dag_id, run_id)["state"])
            return state in FINISHED

        def describe_failure() -> str:
            tasks = {
                f"{task['task_id']}[{task['map_index']}]": task["state"]
                for task in self.task_instances(dag_id, run_id)
            }
            return f"The run {run_id!r} of {dag_id!r} is still {state!r}; its tasks: {tasks}"

        self._wait(is_over, timeout, describe_failure, "scheduler")
        return state

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Returns a run's task instances as JSON, one entry per map index."""
        response = self.api("GET", _run(dag_id, run_id) + "/taskInstances", limit=1000)
        return list(response["task_instances"])

    def task_instance(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1
    ) -> dict[str, Any]:
        """Returns a task instance as JSON."""
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
        """Waits until a task instance is in one of ``states``; returns it as JSON.

        A mapped task instance that does not exist yet counts as one without a state.
        """
        instance: dict[str, Any] = {}

        def reached_state() -> bool:
            try:
                instance.update(self.task_instance(dag_id, run_id, task_id, map_index))
            except ApiError as error:
                if error.status != http.client.NOT_FOUND:
                    raise
            return bool(instance) and instance["state"] in states

        self._wait(
            reached_state,
            timeout,
            lambda: f"{task_id}[{map_index}] is still {instance.get('state')!r}",
            "scheduler",
        )
        return instance

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
        """Clears tasks like the UI; returns the cleared task instances.

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
        response = self.api("POST", f"/dags/{_quote(dag_id)}/clearTaskInstances", body)
        return list(response["task_instances"])

    def set_state(
        self, dag_id: str, run_id: str, task_id: str, state: str, *, map_index: int = -1
    ) -> None:
        """Marks a task instance ``success``, ``failed`` or ``skipped``, like the UI."""
        self.api("PATCH", _task(dag_id, run_id, task_id, map_index), {"new_state": state})

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Marks a run ``success``, ``failed`` or ``queued``, like the UI."""
        self.api("PATCH", _run(dag_id, run_id), {"state": state})

    def delete_run(self, dag_id: str, run_id: str) -> None:
        """Deletes a run, like the UI."""
        self.api("DELETE", _run(dag_id, run_id))

    def pause(self, dag_id: str, paused: bool = True) -> None:
        """Pauses or unpauses a DAG."""
        self.api("PATCH", f"/dags/{_quote(dag_id)}", {"is_paused": paused})


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
