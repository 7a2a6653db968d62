"""What people do to a run in the UI, each in a real scheduler, and what becomes of the messages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(300)]

BATCH = "broadway.batch.default"
PROCESS = "broadway.process"
SPARK = "broadway.handle_batches"
ACK = "broadway.ack"


class World:
    """An Airflow, and a folder for everything else."""

    def __init__(self, folder: Path, airflow: LocalAirflow) -> None:
        self.folder = folder
        self.airflow = airflow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("clicks")
    env = airflow_env(
        home=folder / "home",
        dags=ROOT / "tests" / "integration" / "pipelines" / "clicks",
        port=free_port(),
        settings={
            "broadway.staging": f"file://{folder / 'staging'}",
            # So that a sensor may come back after four seconds: see its ``poke_interval``.
            "workers.min_heartbeat_interval": "1",
        },
    )
    connection = {"conn_type": "broadway_sqlite", "host": str(folder / "queue.db")}
    env["AIRFLOW_CONN_CLICKED_QUEUE"] = json.dumps(connection)
    with LocalAirflow(env, folder / "logs") as airflow:
        airflow.wait_for_dag("clicked")
        yield World(folder, airflow)


class Clicks:
    """The runs of one test, on a queue of its own with 20 messages: two batches."""

    def __init__(self, world: World, name: str) -> None:
        self.airflow = world.airflow
        self.world = world
        self.name = name
        self.folder = world.folder / name
        self.folder.mkdir()
        self.queue = SqliteQueue(world.folder / "queue.db", name)
        self.queue.send([b"%d" % number for number in range(20)])
        self.dag_id = "clicked"
        self.run_id = ""

    def start(self, *signs: str, dag_id: str = "clicked") -> str:
        """Start a run; ``signs`` are ``wait`` and ``die``."""
        for sign in signs:
            (self.folder / sign).touch()
        self.dag_id = dag_id
        self.run_id = self.airflow.trigger(dag_id, {"folder": str(self.folder), "queue": self.name})
        return self.run_id

    def take_down(self, sign: str) -> None:
        (self.folder / sign).unlink()

    def wait(self, task_id: str, *states: str | None, map_index: int = -1) -> None:
        self.airflow.wait_for_task(
            self.dag_id, self.run_id, task_id, states, map_index=map_index, timeout=150
        )

    def end(self) -> str:
        return self.airflow.wait_for_run(self.dag_id, self.run_id, timeout=150)

    def clear(self, *task_ids: str, downstream: bool = False) -> None:
        self.airflow.clear(self.dag_id, self.run_id, task_ids, downstream=downstream)

    def mark(self, task_id: str, state: str) -> None:
        """Mark a task at rest: what a scheduler is just about to start may not stay marked."""
        self.wait(task_id, "failed", "up_for_reschedule")
        self.airflow.set_state(self.dag_id, self.run_id, task_id, state)

    # -- evidence ------------------------------------------------------------------------------

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of ``handle_batch``."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def firsts(self) -> list[int]:
        """The first number of each call's batch."""
        return [call["numbers"][0] for call in self.calls]

    def report(self) -> dict[str, Any]:
        for path in (self.world.folder / "staging").rglob("report.json"):
            told: dict[str, Any] = json.loads(path.read_text())
            if (told["dag_id"], told["run_id"]) == (self.dag_id, self.run_id):
                return told
        raise AssertionError("no report")

    def totals(self) -> dict[str, int]:
        return {name: count for name, count in self.report()["totals"].items() if count}

    def depth(self) -> tuple[int, int, int]:
        """Ready, leased, dead."""
        found = self.queue.depth()
        return found.ready, found.leased, found.dead

    def log(self, task_id: str, try_number: int = 1) -> str:
        """All that a try has logged, errors with their traces, as JSON lines."""
        folder = self.world.folder / "home" / "logs" / f"dag_id={self.dag_id}"
        name = f"run_id={self.run_id}/task_id={task_id}/attempt={try_number}.log"
        return (folder / name).read_text()

    def staged(self) -> Path:
        """The run's folder in staging."""
        for folder in (self.world.folder / "staging").rglob("generations"):
            records = (json.loads(path.read_text()) for path in folder.iterdir())
            if any(record["run_id"] == self.run_id for record in records):
                return folder.parent
        raise AssertionError("nothing is staged")

    def held(self) -> None:
        """Wait until the sensor holds a run whose batcher, or Spark task, has failed."""
        task_id = BATCH if self.dag_id == "clicked" else SPARK
        self.wait(task_id, "failed")
        eventually((self.staged() / "hold.json").exists)
        assert self.depth() == (0, 20, 0)


def eventually(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.2)


@pytest.fixture
def clicks(world: World, request: pytest.FixtureRequest) -> Clicks:
    return Clicks(world, request.node.name.removeprefix("test_")[:40])


def test_clear_process_gives_back_and_receives_anew(clicks: Clicks) -> None:
    # Given a run whose first batch has an outcome, and whose second has killed its task
    clicks.start("die")
    clicks.held()
    assert clicks.firsts() == [0, 10]

    # When its process task is cleared, with what follows
    clicks.take_down("die")
    clicks.clear(PROCESS, downstream=True)

    # Then both batches are handled anew, marked, and the old outcome counts for nothing
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 0, 10]
    assert [call["redelivered"] for call in clicks.calls] == [0, 0, 10, 10]
    assert clicks.totals() == {"received": 40, "released": 20, "acked": 20, "accounted": 40}
    assert clicks.depth() == (0, 0, 0)


def test_clear_a_batcher_rebuilds_the_same_batches(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.held()

    clicks.take_down("die")
    clicks.clear(BATCH)

    # Then only the batch without an outcome runs, under the id it had
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 10]
    assert clicks.calls[1]["batch_id"] == clicks.calls[2]["batch_id"]
    assert clicks.totals() == {"received": 20, "acked": 20, "accounted": 20}
    assert clicks.depth() == (0, 0, 0)


@pytest.mark.spark
def test_clear_handle_batches_before_and_after_settlement(clicks: Clicks) -> None:
    # Given a Spark application that died at its second batch
    clicks.start("die", dag_id="clicked_spark")
    clicks.held()

    # When the task is cleared before anything is settled
    clicks.take_down("die")
    clicks.clear(SPARK)

    # Then only the batch without an outcome runs
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 10]
    assert clicks.totals() == {"received": 20, "acked": 20, "accounted": 20}

    # When it is cleared again, after settlement
    clicks.clear(SPARK)

    # Then no code of the user's runs, and the log says how it was settled and how to run it again
    assert clicks.end() == "success"
    assert len(clicks.calls) == 3
    log = clicks.log(SPARK, 3)
    assert f"airflow-broadway replay --dag-id clicked_spark --run-id {clicks.run_id}" in log
    assert "acked 20" in log
    assert clicks.depth() == (0, 0, 0)


def test_clear_ack_tells_the_same_and_changes_nothing(clicks: Clicks) -> None:
    clicks.start()
    assert clicks.end() == "success"
    before = {**clicks.report(), "at": ""}

    clicks.clear(ACK)

    assert clicks.end() == "success"
    assert {**clicks.report(), "at": ""} == before
    assert clicks.firsts() == [0, 10]
    assert clicks.depth() == (0, 0, 0)


def test_mark_a_batcher_success_releases_what_has_no_outcome(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.held()

    clicks.mark(BATCH, "success")

    assert clicks.end() == "success"
    assert clicks.totals() == {"received": 20, "acked": 10, "released": 10, "accounted": 20}
    assert clicks.depth() == (10, 0, 0)


def test_mark_handle_batches_success_releases_what_has_no_outcome(clicks: Clicks) -> None:
    # Given a Spark task that could not start, for its connection is missing
    clicks.start(dag_id="clicked_no_spark")
    clicks.held()
    assert "the Spark connection 'nowhere' is not defined" in clicks.log(SPARK)

    clicks.mark(SPARK, "success")

    assert clicks.end() == "success"
    assert clicks.totals() == {"received": 20, "released": 20, "accounted": 20}
    assert clicks.depth() == (20, 0, 0)


def swept(clicks: Clicks) -> None:
    """The next run settles what has an outcome, releases the rest, and handles that."""
    clicks.take_down("die")
    clicks.start()
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 10]
    assert clicks.calls[2]["redelivered"] == 10
    assert clicks.totals() == {"received": 10, "acked": 10, "accounted": 10}
    assert clicks.depth() == (0, 0, 0)
    assert clicks.queue.leases() == []


def test_mark_ack_leaves_it_to_the_next_runs_sweep(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.held()

    clicks.mark(ACK, "success")

    assert clicks.end() == "failed"
    assert clicks.depth() == (0, 20, 0)
    swept(clicks)


def test_mark_the_run_leaves_it_to_the_next_runs_sweep(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.held()

    clicks.airflow.set_run_state(clicks.dag_id, clicks.run_id, "failed")

    assert clicks.end() == "failed"
    eventually(lambda: clicks.depth()[1] == 20)
    swept(clicks)


def test_delete_the_run_leaves_it_to_the_next_runs_sweep(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.held()

    # Airflow deletes no run that is not over.
    clicks.airflow.set_run_state(clicks.dag_id, clicks.run_id, "failed")
    clicks.airflow.delete_run(clicks.dag_id, clicks.run_id)

    assert clicks.depth() == (0, 20, 0)
    swept(clicks)


def test_pause_lets_running_work_settle_itself(clicks: Clicks) -> None:
    # Given a batcher at work when the Dag is paused, so that nobody looks after the run
    clicks.start("wait", dag_id="clicked_deferred")
    eventually(lambda: clicks.firsts() == [0, 10])
    clicks.airflow.pause(clicks.dag_id)
    try:
        # A look that has begun may end; the trigger may fire, but its task is not started.
        clicks.wait(ACK, "deferred", "scheduled")
        time.sleep(2.0)
        clicks.wait(ACK, "deferred", "scheduled")
        long_ago = datetime.now(UTC) - timedelta(minutes=2)
        heartbeat = clicks.staged() / "heartbeat.json"
        heartbeat.write_text(json.dumps({"at": long_ago.isoformat()}))

        # When the work is done
        clicks.take_down("wait")
        clicks.wait(BATCH, "success")

        # Then the batcher has settled it
        assert "No ack sensor has looked after this run lately: settling here." in clicks.log(BATCH)
        assert clicks.depth() == (0, 0, 0)
        assert clicks.queue.leases() == []
    finally:
        clicks.airflow.pause(clicks.dag_id, False)

    # And the sensor, once it may, finds all in order
    assert clicks.end() == "success"
    assert clicks.totals() == {"received": 20, "acked": 20, "accounted": 20}
    assert clicks.firsts() == [0, 10]
