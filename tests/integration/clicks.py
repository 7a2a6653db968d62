"""User actions on a run in the UI, each in a real scheduler, and the final states of its messages.

DESIGN's table "the user does", row by row, as functions on :class:`Clicks`: the tests run them on
every broker, and so does ``make faults`` on those that are not embedded.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from airflow_broadway.runs.outcomes import run_again_command
from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home
from tests.faults.case_result import CaseResult
from tests.integration.click_queues import SERVERS, Server
from tests.waiting import eventually

BATCH = "broadway.batch.default"
PROCESS = "broadway.process"
SPARK = "broadway.handle_batches"
ACK = "broadway.ack"

#: Messages in each test's queue: two batches.
COUNT = 20


class World:
    """An Airflow, a broker, and a folder for everything else."""

    def __init__(self, broker: str, folder: Path, airflow: LocalAirflow, server: Server) -> None:
        self.broker = broker
        self.folder = folder
        self.airflow = airflow
        self.server = server


@contextmanager
def world_of(broker: str, folder: Path) -> Iterator[World]:
    """Starts an Airflow of its own for the user actions."""
    server = SERVERS[broker](folder)
    env = airflow_env(
        home=made_home(folder / "home"),
        dags=ROOT / "tests" / "integration" / "pipelines" / "clicks",
        port=free_port(),
        settings={
            "broadway.staging": f"file://{folder / 'staging'}",
            # So that a sensor may be rescheduled after four seconds: see its ``poke_interval``.
            "workers.min_heartbeat_interval": "1",
        },
    )
    env |= server.variables()
    with LocalAirflow(env, folder / "logs") as airflow:
        airflow.wait_for_dag(f"{server.prefix}clicked")
        yield World(broker, folder, airflow, server)


@dataclass(frozen=True, slots=True, kw_only=True)
class Click:
    """One user action.

    :param run: Performs it, and checks its effect.
    :param spark: Whether it needs Spark.
    :param brokers: The brokers that it applies to.
    """

    name: str
    run: Callable[[Clicks], None]
    spark: bool
    brokers: tuple[str, ...]


#: All rows of the table.
CLICKS: list[Click] = []


def click(
    *, spark: bool = False, brokers: tuple[str, ...] = ("sqlite", "rabbitmq")
) -> Callable[[Callable[[Clicks], None]], Callable[[Clicks], None]]:
    """Declares a user action; its name is the function's."""

    def declare(function: Callable[[Clicks], None]) -> Callable[[Clicks], None]:
        CLICKS.append(Click(name=function.__name__, run=function, spark=spark, brokers=brokers))
        return function

    return declare


class Clicks:
    """The runs of one test, on a queue of its own with 20 messages: two batches."""

    def __init__(self, world: World, name: str) -> None:
        self.airflow = world.airflow
        self.world = world
        self.name = name
        self.folder = world.folder / name
        self.folder.mkdir()
        self.queue = world.server.queue(name, COUNT)
        self.dag_id = ""
        self.run_id = ""

    def start(self, *signs: str, dag_id: str = "clicked") -> str:
        """Starts a run; ``signs`` are ``wait`` and ``die``."""
        for sign in signs:
            (self.folder / sign).touch()
        self.dag_id = self.world.server.prefix + dag_id
        params = {"folder": str(self.folder), "queue": self.name}
        self.run_id = self.airflow.trigger(self.dag_id, params)
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
        """Marks an idle task: one that the scheduler is about to start may not stay marked."""
        self.wait(task_id, "failed", "up_for_reschedule")
        self.airflow.set_state(self.dag_id, self.run_id, task_id, state)

    # -- evidence ------------------------------------------------------------------------------

    def asset_events(self) -> list[dict[str, Any]]:
        """Returns the events of the run's outlets, the latest first."""
        response = self.airflow.api("GET", "/assets/events", order_by="-timestamp", limit=100)
        return [
            {"name": event["name"], **event["extra"]}
            for event in response["asset_events"]
            if (event["source_dag_id"], event["source_run_id"]) == (self.dag_id, self.run_id)
        ]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of ``handle_batch``."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def firsts(self) -> list[int]:
        """Returns the first number of each call's batch."""
        return [call["numbers"][0] for call in self.calls]

    def report(self) -> dict[str, Any]:
        for path in (self.world.folder / "staging").rglob("report.json"):
            output: dict[str, Any] = json.loads(path.read_text())
            if (output["dag_id"], output["run_id"]) == (self.dag_id, self.run_id):
                return output
        raise AssertionError("no report")

    def totals(self) -> dict[str, int]:
        return {name: count for name, count in self.report()["totals"].items() if count}

    def depth(self) -> tuple[int, int, int]:
        """Returns the numbers of ready, leased, and dead messages."""
        return self.queue.depth()

    def result(self, case: str) -> CaseResult:
        """Returns the final states of the messages, once the run's end is as expected."""
        result = CaseResult(f"rabbitmq.click.{case}", COUNT)
        seen: Counter[int] = Counter()
        ids: dict[int, set[str]] = {}
        for call in self.calls:
            for number in call["numbers"]:
                before = ids.setdefault(number, set())
                marked = call["batch_id"] in before or call["redelivered"] == len(call["numbers"])
                result.duplicates += seen[number] > 0
                result.unmarked += seen[number] > 0 and not marked
                seen[number] += 1
                before.add(call["batch_id"])
        ready, leased, dead = self.depth()
        # A message that was never handled must still be ready.
        unhandled = [number for number in range(COUNT) if not seen[number]]
        result.lost = unhandled[ready:]
        if leased or dead:
            result.mistakes.append(f"{leased} messages are leased, and {dead} dead")
        return result

    def log(self, task_id: str, try_number: int = 1) -> str:
        """Returns the log of a try, errors with their tracebacks, as JSON lines."""
        folder = self.world.folder / "home" / "logs" / f"dag_id={self.dag_id}"
        name = f"run_id={self.run_id}/task_id={task_id}/attempt={try_number}.log"
        return (folder / name).read_text()

    def staged(self) -> Path:
        """Returns the run's folder in staging."""
        for folder in (self.world.folder / "staging").rglob("generations"):
            records = (json.loads(path.read_text()) for path in folder.iterdir())
            if any(record["run_id"] == self.run_id for record in records):
                return folder.parent
        raise AssertionError("nothing is staged")

    def drivers(self) -> list[int]:
        """Returns Spark's processes: those that name the run's folder in staging."""
        folder = str(self.staged())
        processes = psutil.process_iter(["pid", "cmdline"])
        return [
            process.pid
            for process in processes
            if folder in " ".join(process.info["cmdline"] or ())
        ]

    def wait_until_held(self) -> None:
        """Waits until the sensor holds a run whose batcher, or Spark task, has failed."""
        task_id = BATCH if self.dag_id.endswith("clicked") else SPARK
        self.wait(task_id, "failed")
        eventually((self.staged() / "hold.json").exists)
        assert self.depth() == (0, 20, 0)


@click()
def clear_process_releases_and_receives_again(clicks: Clicks) -> None:
    # Given a run whose first batch has an outcome, and whose second has killed its task
    clicks.start("die")
    clicks.wait_until_held()
    assert clicks.firsts() == [0, 10]

    # When its process task is cleared, with its downstream tasks
    clicks.take_down("die")
    clicks.clear(PROCESS, downstream=True)

    # Then both batches are handled again, marked, and the old outcome is discarded
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 0, 10]
    assert [call["redelivered"] for call in clicks.calls] == [0, 0, 10, 10]
    assert clicks.totals() == {"received": 40, "released": 20, "acked": 20, "accounted": 40}
    assert clicks.depth() == (0, 0, 0)


@click()
def clear_a_batcher_rebuilds_the_same_batches(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.wait_until_held()

    clicks.take_down("die")
    clicks.clear(BATCH)

    # Then only the batch without an outcome runs, with its previous id
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 10]
    assert clicks.calls[1]["batch_id"] == clicks.calls[2]["batch_id"]
    assert clicks.totals() == {"received": 20, "acked": 20, "accounted": 20}
    assert clicks.depth() == (0, 0, 0)


@click(spark=True)
def clear_handle_batches_before_and_after_settlement(clicks: Clicks) -> None:
    # Given a Spark application that was stopped at its second batch
    clicks.start("wait", dag_id="clicked_spark")
    eventually(lambda: len(clicks.calls) == 2, timeout=150)
    clicks.airflow.set_state(clicks.dag_id, clicks.run_id, SPARK, "failed")
    eventually(lambda: not clicks.drivers(), timeout=150)
    clicks.wait_until_held()
    assert clicks.asset_events() == []

    # When the task is cleared before anything is settled
    clicks.take_down("wait")
    clicks.clear(SPARK)

    # Then only the batch without an outcome runs
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 10]
    assert clicks.totals() == {"received": 20, "acked": 20, "accounted": 20}
    # and the batcher's outlet has an event of both
    [output] = clicks.asset_events()
    assert output == {
        "name": "clicked-table",
        "pipeline": clicks.report()["pipeline"],
        "batches": 2,
        "successful": 20,
        "failed": 0,
        "batch_ids": [call["batch_id"] for call in clicks.calls[:2]],
        "batch_ids_left_out": 0,
    }

    # When it is cleared again, after settlement
    clicks.clear(SPARK)

    # Then no user code runs, and the log has the settlement and the command that repeats the run
    assert clicks.end() == "success"
    assert len(clicks.calls) == 3
    assert clicks.asset_events() == [output, output]
    log = clicks.log(SPARK, 3)
    command = run_again_command(clicks.dag_id, clicks.run_id)
    assert json.dumps(command)[1:-1] in log
    assert "acked 20" in log
    assert clicks.depth() == (0, 0, 0)


@click()
def clear_ack_reports_the_same_and_changes_nothing(clicks: Clicks) -> None:
    clicks.start()
    assert clicks.end() == "success"
    before = {**clicks.report(), "at": ""}

    clicks.clear(ACK)

    assert clicks.end() == "success"
    assert {**clicks.report(), "at": ""} == before
    assert clicks.firsts() == [0, 10]
    assert clicks.depth() == (0, 0, 0)


@click()
def mark_a_batcher_success_releases_messages_without_outcome(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.wait_until_held()

    clicks.mark(BATCH, "success")

    assert clicks.end() == "success"
    assert clicks.totals() == {"received": 20, "acked": 10, "released": 10, "accounted": 20}
    assert clicks.depth() == (10, 0, 0)


@click()
def mark_handle_batches_success_releases_messages_without_outcome(clicks: Clicks) -> None:
    # Given a Spark task that could not start, because its connection is missing
    clicks.start(dag_id="clicked_no_spark")
    clicks.wait_until_held()
    assert "the Spark connection 'nowhere' is not defined" in clicks.log(SPARK)

    clicks.mark(SPARK, "success")

    assert clicks.end() == "success"
    assert clicks.totals() == {"received": 20, "released": 20, "accounted": 20}
    assert clicks.depth() == (20, 0, 0)


def check_next_run_sweeps(clicks: Clicks) -> None:
    """Checks that a next run settles batches with an outcome; the rest is released and handled."""
    clicks.take_down("die")
    clicks.start()
    assert clicks.end() == "success"
    assert clicks.firsts() == [0, 10, 10]
    assert clicks.calls[2]["redelivered"] == 10
    assert clicks.totals() == {"received": 10, "acked": 10, "accounted": 10}
    assert clicks.depth() == (0, 0, 0)


@click()
def mark_ack_leaves_messages_to_the_next_runs_sweep(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.wait_until_held()

    clicks.mark(ACK, "success")

    # Airflow marks the run, too: ``ack`` is its last task.
    assert clicks.end() == "success"
    assert clicks.depth() == (0, 20, 0)
    check_next_run_sweeps(clicks)


@click()
def mark_the_run_leaves_messages_to_the_next_runs_sweep(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.wait_until_held()

    clicks.airflow.set_run_state(clicks.dag_id, clicks.run_id, "failed")

    assert clicks.end() == "failed"
    eventually(lambda: clicks.depth()[1] == 20)
    check_next_run_sweeps(clicks)


@click()
def delete_the_run_leaves_messages_to_the_next_runs_sweep(clicks: Clicks) -> None:
    clicks.start("die")
    clicks.wait_until_held()

    # Airflow deletes no run that is not over.
    clicks.airflow.set_run_state(clicks.dag_id, clicks.run_id, "failed")
    clicks.airflow.delete_run(clicks.dag_id, clicks.run_id)

    assert clicks.depth() == (0, 20, 0)
    check_next_run_sweeps(clicks)


@click()
def pause_lets_a_running_batcher_settle(clicks: Clicks) -> None:
    # Given a running batcher when the Dag is paused, so that the run has no sensor
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
    finally:
        clicks.airflow.pause(clicks.dag_id, False)

    # And the sensor, once it runs, reports every message as settled
    assert clicks.end() == "success"
    assert clicks.totals() == {"received": 20, "acked": 20, "accounted": 20}
    assert clicks.firsts() == [0, 10]


@click(spark=True, brokers=("rabbitmq",))
def let_the_lease_lapse_during_spark(clicks: Clicks) -> None:
    # Given a Spark application that handles its second batch when the lease ends
    clicks.start("wait", dag_id="clicked_lapse")
    eventually(lambda: clicks.firsts() == [0, 10], timeout=170.0)
    lapsed_run = clicks.dag_id, clicks.run_id
    [lease] = clicks.staged().rglob("lease.json")
    deadline = datetime.fromisoformat(json.loads(lease.read_text())["deadline"])
    eventually(lambda: datetime.now(UTC) > deadline, timeout=200.0)
    assert clicks.depth() == (0, 20, 0)

    # When the next run takes its messages over, and both record their outcomes
    clicks.start(dag_id="clicked")
    eventually(lambda: clicks.firsts() == [0, 10, 0, 10], timeout=170.0)
    clicks.take_down("wait")

    # Then the next run settles all messages, marked
    assert clicks.end() == "success"
    assert [call["redelivered"] for call in clicks.calls] == [0, 0, 10, 10]
    assert clicks.totals() == {"received": 20, "acked": 20, "accounted": 20}

    # And the other run fails, and has settled nothing
    clicks.dag_id, clicks.run_id = lapsed_run
    assert clicks.end() == "failed"
    assert clicks.totals() == {"received": 20, "lapsed": 20, "accounted": 20}
    assert clicks.depth() == (0, 0, 0)
