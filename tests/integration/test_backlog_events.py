"""From the event of a backlog to the acked message, in a real scheduler with a triggerer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]

PIPELINE = """\
from airflow_broadway import Batcher, Broadway, backlog
from airflow_broadway.producers import SqliteProducer


class Sums(Broadway):
    producer = SqliteProducer(queue="sums", conn_id="sums_queue", lease=60.0)
    batchers = {"default": Batcher(engine="python", outlets=["sums-table"])}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages
"""

DAGS = """\
from airflow.sdk import DAG, Asset, task

from airflow_broadway import backlog
from airflow_broadway.sensors.backlog import BroadwayBacklogSensor
from sums_pipeline import Sums

Sums.dag("sums", schedule=backlog(min_messages=3, poke_interval=1.0))

with DAG("waits", schedule=None):
    BroadwayBacklogSensor(
        task_id="wait", pipeline=Sums, min_messages=2, poke_interval=1.0, deferrable=True
    )
"""


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteQueue]:
    with SqliteQueue(tmp_path_factory.mktemp("queue") / "queue.db", "sums") as queue:
        yield queue


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory, queue: SqliteQueue) -> Iterator[LocalAirflow]:
    folder = tmp_path_factory.mktemp("events")
    (folder / "dags").mkdir()
    (folder / "dags" / "sums_pipeline.py").write_text(PIPELINE)
    (folder / "dags" / "events.py").write_text(DAGS)
    env = airflow_env(home=made_home(folder / "home"), dags=folder / "dags", port=free_port())
    env["AIRFLOW_CONN_SUMS_QUEUE"] = json.dumps(
        {"conn_type": "broadway_sqlite", "host": str(queue.path)}
    )
    # What lies beside the Dag files is not on the path of Airflow's processes, as in production.
    env["PYTHONPATH"] = env["PYTHONPATH"].split(":")[0]
    with LocalAirflow(env, folder / "logs") as airflow:
        airflow.wait_for_dag("sums")
        yield airflow


def runs(airflow: LocalAirflow) -> list[dict[str, Any]]:
    found: dict[str, Any] = airflow.api("GET", "/dags/sums/dagRuns", order_by="run_after")
    return list(found["dag_runs"])


def events(airflow: LocalAirflow, asset: str) -> list[dict[str, Any]]:
    found: dict[str, Any] = airflow.api("GET", "/assets/events", limit=100)
    return [each for each in found["asset_events"] if each["name"] == asset]


def finished(airflow: LocalAirflow, number: int) -> dict[str, Any]:
    """The ``number``-th run of the Dag, once it has ended."""
    eventually(lambda: len(runs(airflow)) >= number, timeout=120.0)
    run = runs(airflow)[number - 1]
    assert airflow.wait_for_run("sums", run["dag_run_id"]) == "success"
    return run


def test_events_start_runs_that_ack_and_nothing_is_lost_or_done_twice(
    airflow: LocalAirflow, queue: SqliteQueue
) -> None:
    # Given a backlog below the bound, and a few looks
    queue.send([b"1", b"2"])
    time.sleep(5.0)
    assert runs(airflow) == []

    # When one more message comes
    queue.send([b"3"])

    # Then one event starts one run, which acks them all
    run = finished(airflow, 1)
    assert run["run_type"] == "asset_triggered"
    assert queue.depth()[:4] == (0, 0, 0, 0)
    [event] = events(airflow, "sums.Sums.backlog")
    told = event["extra"]["payload"]
    assert (told["ready"], told["reason"]) == (3, "3 messages (min_messages=3)")
    # and the batcher's outlet has one of what its batches changed
    [produced] = events(airflow, "sums-table")
    assert (produced["extra"]["successful"], len(produced["extra"]["batch_ids"])) == (3, 1)

    # When an event comes again that was told before the run began, as by a second triggerer
    queue.send([b"4"])
    body = {"asset_id": event["asset_id"], "extra": {"payload": told}}
    airflow.api("POST", "/assets/events", body)

    # Then its run ends at once, takes nothing, and says why
    second = finished(airflow, 2)
    assert queue.depth().ready == 1
    states = {
        each["task_id"]: each["state"]
        for each in airflow.task_instances("sums", second["dag_run_id"])
    }
    assert states["broadway.process"] == "skipped"
    assert f"The run {run['dag_run_id']} began at" in log_of(airflow, second["dag_run_id"])

    # When more come while the Dag is paused, and for longer than its watcher lives then
    airflow.pause("sums")
    queue.send([b"5", b"6", b"7"])
    time.sleep(20.0)
    assert len(runs(airflow)) == 2

    # Then they are handled once it goes on
    airflow.pause("sums", False)
    finished(airflow, 3)
    assert queue.depth()[:4] == (0, 0, 0, 0)


def test_a_deferred_sensor_waits_in_the_triggerer(
    airflow: LocalAirflow, queue: SqliteQueue
) -> None:
    airflow.wait_for_dag("waits")
    run = airflow.trigger("waits")
    airflow.wait_for_task("waits", run, "wait", ("deferred",))

    queue.send([b"1", b"2"])

    assert airflow.wait_for_run("waits", run) == "success"
    assert queue.depth().ready == 2


def log_of(airflow: LocalAirflow, run_id: str) -> str:
    folder = next((airflow.home / "logs" / "dag_id=sums").glob(f"run_id={run_id}"))
    return "".join(path.read_text() for path in folder.rglob("*.log"))
