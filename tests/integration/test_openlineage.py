"""The events of a run from Airflow's OpenLineage provider, by its file transport."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_env import airflow_env
from tests.airflow_home import made_home

pytestmark = pytest.mark.airflow

PIPELINE = """
from airflow_broadway import Batcher, Broadway, RetryPolicy
from airflow_broadway.producers import SqliteProducer
from airflow_broadway.sinks import ParquetFolder

class Orders(Broadway):
    producer = SqliteProducer(
        queue="orders", path="{folder}/queue.db", retry=RetryPolicy(max_attempts=1)
    )
    batchers = {{"default": Batcher(engine="python", sink=ParquetFolder(path="{folder}/table"))}}

    def handle_message(self, processor, message, context):
        return message.failed("bad") if message.data == b"bad" else message

    def handle_batch(self, batcher, messages, info, context):
        return [{{"text": message.data.decode()}} for message in messages]
"""
DAG = """
from airflow_broadway.operators.run import BroadwayRunOperator
from orders import Orders
from airflow.sdk import DAG

staged = Orders.dag("staged", default_args={"retries": 0})
with DAG("unstaged") as unstaged:
    BroadwayRunOperator(task_id="run", pipeline=Orders)

if __name__ == "__main__":
    from airflow_broadway.producers import SqliteQueue

    for dag in (staged, unstaged):
        with SqliteQueue("queue.db", "orders") as queue:
            queue.send([b"1", b"2", b"bad"])
        dag.test()
"""


class Events:
    """The events of one run, by task."""

    def __init__(self, path: Path) -> None:
        self.all: list[dict[str, Any]] = [
            json.loads(line) for line in path.read_text().splitlines()
        ]

    def last(self, task: str) -> dict[str, Any]:
        """Returns the event at the end of a task."""
        [event] = [
            e
            for e in self.all
            if e["job"]["name"].endswith(f".{task}") and e["eventType"] in ("COMPLETE", "FAIL")
        ]
        return event


def datasets(event: dict[str, Any], kind: str) -> list[tuple[str, str]]:
    return [(dataset["namespace"], dataset["name"]) for dataset in event[kind]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lineage")
    (folder / "orders.py").write_text(PIPELINE.format(folder=folder))
    (folder / "orders_dag.py").write_text(DAG)
    return folder


@pytest.fixture(scope="module")
def events(folder):
    """The events of a run of both Dags, in a process that has OpenLineage on."""
    transport = {"type": "file", "log_file_path": f"{folder}/events.json", "append": True}
    env = airflow_env(home=made_home(folder / "home"), dags=folder)
    subprocess.run(
        [sys.executable, folder / "orders_dag.py"],
        cwd=folder,
        env={
            **os.environ,
            **env,
            "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport),
            "AIRFLOW__BROADWAY__STAGING": f"file://{folder}/staging",
        },
        check=True,
        timeout=250,
    )
    return Events(folder / "events.json")


def test_run_reports_its_queue_its_table_and_its_counts(folder, events):
    queue, table = ("file", f"{folder}/queue.db/orders"), ("file", f"{folder}/table")
    process, batch, ack = (
        events.last(f"broadway.{task}") for task in ("process", "batch.default", "ack")
    )
    assert [datasets(event, "inputs") for event in (process, batch, ack)] == [[queue]] * 3
    assert [datasets(event, "outputs") for event in (process, batch, ack)] == [[], [table], [table]]
    assert process["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == 3
    assert batch["run"]["facets"]["broadway"]["counts"]["successful"] == 2
    facet = ack["run"]["facets"]["broadway"]
    assert facet["pipeline"] == "Orders"
    assert {name: facet["counts"][name] for name in ("received", "acked", "dead_lettered")} == {
        "received": 3,
        "acked": 2,
        "dead_lettered": 1,
    }
    assert facet["counts"]["batchers"]["default"]["successful"] == 2
    assert facet["_schemaURL"].startswith("https://openlineage.io/spec/")


def test_run_in_one_task_reports_the_same(folder, events):
    event = events.last("run")

    assert datasets(event, "inputs") == [("file", f"{folder}/queue.db/orders")]
    assert datasets(event, "outputs") == [("file", f"{folder}/table")]
    assert event["run"]["facets"]["broadway"]["counts"]["acked"] == 2
