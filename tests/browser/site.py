"""The Airflow that all tests in a browser share: its users, its DAGs, its queues."""

from __future__ import annotations

import json
import shutil
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home

#: Users of Airflow's simple auth manager, by name, and what they may; a password is the name twice.
USERS = {"admin": "admin", "viewer": "viewer"}

_HERE = Path(__file__).parent


class Site:
    """An Airflow with users, and the queues that its DAGs drain.

    :param folder: Where everything of it lies.
    :param spark_history: The port at which it expects Spark's history server.
    """

    def __init__(self, folder: Path, airflow: LocalAirflow, spark_history: int) -> None:
        self.folder = folder
        self.spark_history = spark_history
        self.airflow = airflow
        self.url = airflow.url
        self._tokens: dict[str, str] = {}

    def token(self, user: str) -> str:
        """Returns the user's token for cookies and headers."""
        if user not in self._tokens:
            self._tokens[user] = self.airflow.token_for((user, user * 2))
        return self._tokens[user]

    def queue(self, name: str) -> SqliteQueue:
        """Returns the queue that the DAGs know by this name."""
        return SqliteQueue(self.folder / "queues.db", name)

    def trigger(self, dag_id: str, **conf: Any) -> Run:
        """Starts a run, as soon as the DAG is known."""
        self.airflow.wait_for_dag(dag_id)
        return Run(self, dag_id, self.airflow.trigger(dag_id, conf))

    def runs(self, dag_id: str) -> list[Run]:
        """The runs of a DAG, the oldest first."""
        self.airflow.wait_for_dag(dag_id)
        response = self.airflow.api("GET", f"/dags/{dag_id}/dagRuns", order_by="run_after")
        return [Run(self, dag_id, run["dag_run_id"]) for run in response["dag_runs"]]

    def conf(self, run: Run) -> dict[str, Any]:
        """Returns the configuration of a run."""
        run_id = urllib.parse.quote(run.run_id, safe="")
        response = self.airflow.api("GET", f"/dags/{run.dag_id}/dagRuns/{run_id}")
        return response["conf"] or {}

    def request(
        self, method: str, path: str, *, user: str | None = None, **options: Any
    ) -> requests.Response:
        """Requests as ``user``, or anonymously; path unchanged, redirects not followed."""
        session = requests.Session()
        # The proxies of a developer's environment are for other hosts.
        session.trust_env = False
        if user is not None:
            session.cookies.set("_token", self.token(user))
        prepared = session.prepare_request(requests.Request(method, self.url, **options))
        # As it is written: `requests` would resolve the dots of a path.
        prepared.url = self.url + path
        return session.send(prepared, timeout=60, allow_redirects=False)

    def get(self, path: str, *, user: str | None = None, **options: Any) -> requests.Response:
        """``GET`` as ``user``, or anonymously."""
        return self.request("GET", path, user=user, **options)


@dataclass(frozen=True)
class Run:
    """A Dag run."""

    site: Site
    dag_id: str
    run_id: str

    @property
    def page(self) -> str:
        """The path of its page."""
        run_id = urllib.parse.quote(self.run_id, safe="")
        return f"/broadway/dags/{self.dag_id}/runs/{run_id}"

    def wait(self) -> None:
        """Waits until it has succeeded."""
        state = self.site.airflow.wait_for_run(self.dag_id, self.run_id)
        assert state == "success", f"{self.dag_id} {self.run_id}: {state}"


@contextmanager
def site_in(folder: Path) -> Iterator[Site]:
    """Starts the Airflow in a folder that is new, healthy inside."""
    shutil.rmtree(folder, ignore_errors=True)
    dags = folder / "dags"
    shutil.copytree(_HERE / "dags", dags)
    for name in ("flights.py", "flights_pipeline.py"):
        shutil.copy2(ROOT / "dags" / name, dags)
    passwords = folder / "passwords.json"
    passwords.write_text(json.dumps({user: user * 2 for user in USERS}))
    spark_history = free_port()
    env = airflow_env(
        home=made_home(folder / "home"),
        dags=dags,
        port=free_port(),
        settings={
            "core.auth_manager": "tests.browser.auth_manager.PerDag",
            "core.simple_auth_manager_all_admins": "False",
            "core.simple_auth_manager_users": ",".join(":".join(item) for item in USERS.items()),
            "core.simple_auth_manager_passwords_file": str(passwords),
            "broadway.staging": f"file://{folder / 'staging'}",
            "broadway.ask_brokers": "True",
            "broadway.spark_history": f"http://127.0.0.1:{spark_history}",
        },
    )
    env |= _connections(folder)
    airflow = LocalAirflow(
        env,
        folder / "logs",
        # Nothing here is deferred.
        components=("api-server", "scheduler", "dag-processor"),
        login=("admin", "adminadmin"),
    )
    with airflow:
        yield Site(folder, airflow, spark_history)


def _connections(folder: Path) -> Mapping[str, str]:
    queue = {"conn_type": "broadway_sqlite", "host": str(folder / "queues.db")}
    names = ("flights_queue", "letters_queue")
    return {f"AIRFLOW_CONN_{name.upper()}": json.dumps(queue) for name in names}
