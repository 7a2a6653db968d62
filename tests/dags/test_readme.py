"""The README's code does what the README says, as a newcomer would copy it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home

README = (ROOT / "README.md").read_text(encoding="utf-8")
PIPELINE, DAG, SEND, TEST = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's own folder, with the README's files and its ``/data`` in it."""
    (tmp_path / "dags").mkdir()
    for name, text in {
        "dags/orders_pipeline.py": PIPELINE,
        "dags/orders.py": DAG,
        "send.py": SEND,
        "test_orders.py": TEST,
    }.items():
        (tmp_path / name).write_text(text.replace("/data/", f"{tmp_path}/data/"))
    (tmp_path / "data").mkdir()
    return tmp_path


def env_of(project: Path, home: Path, **more: Any) -> dict[str, str]:
    """The environment that the README sets up."""
    env = airflow_env(home=home, dags=project / "dags", **more)
    for name, connection in re.findall(r"export (AIRFLOW_CONN_\w+)='(.*)'", README):
        env[name] = connection.replace("/data/", f"{project}/data/")
    return env


def python(project: Path, *arguments: str, timeout: float = 120.0) -> str:
    home = made_home(project / "airflow")
    env = env_of(project, home)
    if "orders_run.py" in arguments:
        LocalAirflow(env, home / "logs").migrate()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_its_pipeline_passes_its_test(project: Path) -> None:
    result = python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py")

    assert "1 passed" in result


def test_its_dag_parses(project: Path) -> None:
    text = python(
        project, str(Path(__file__).with_name("parse.py")), str(project / "dags" / "orders.py")
    )

    result = json.loads(text.splitlines()[-1])
    assert result["errors"] == {}
    assert list(result["dags"]) == ["orders"]


@pytest.mark.airflow
@pytest.mark.spark
def test_its_dag_writes_what_was_sent(project: Path) -> None:
    # Given the README's message in the README's queue
    python(project, "send.py")

    # When the DAG runs once
    (project / "orders_run.py").write_text("from orders import dag\n\ndag.test()\n")
    result = python(project, "orders_run.py", timeout=240.0)

    # Then Spark has written the order, and the queue is empty
    assert (project / "data" / "orders").is_dir(), result
    rows = ds.dataset(project / "data" / "orders", format="parquet", partitioning="hive")
    [row] = rows.to_table(columns=["customer", "amount"]).to_pylist()
    assert row == {"customer": "ada", "amount": 12.5}, result
    depth = SqliteQueue(project / "data" / "queue.db", "orders").depth()
    assert (depth.ready, depth.leased, depth.dead) == (0, 0, 0), result


@pytest.mark.airflow
@pytest.mark.spark
@pytest.mark.slow
def test_its_dag_takes_what_was_sent_once_it_is_switched_on(project: Path) -> None:
    # Given the README's message in the README's queue, and its DAG in a new Airflow
    python(project, "send.py")
    home = project / "another"
    env = env_of(project, home, port=free_port())
    env["AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION"] = "True"  # as Airflow itself
    with LocalAirflow(env, home / "logs") as airflow:
        airflow.wait_for_dag("orders")
        runs = "/dags/orders/dagRuns"
        assert airflow.api("GET", runs)["dag_runs"] == []

        # When it is switched on, and nobody triggers it
        airflow.pause("orders", paused=False)
        deadline = time.monotonic() + 60
        while not (made := airflow.api("GET", runs)["dag_runs"]):
            assert time.monotonic() < deadline, "no run was scheduled"
            time.sleep(0.5)

        # Then a scheduled run takes the message
        [run] = made
        assert run["run_type"] == "scheduled"
        assert airflow.wait_for_run("orders", run["dag_run_id"]) == "success"
    rows = ds.dataset(project / "data" / "orders", format="parquet", partitioning="hive")
    assert rows.to_table(columns=["customer"]).to_pylist() == [{"customer": "ada"}]


def test_its_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]

    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
