"""From the event of a backlog to the acked message, in a real scheduler with triggerers."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(900)]

PIPELINE = """\
from airflow_broadway import Batcher, Broadway, backlog
from airflow_broadway.producers import SqliteProducer


class Sums(Broadway):
    producer = SqliteProducer(queue="sums", conn_id="the_queue", lease=60.0)
    batchers = {"default": Batcher(engine="python", outlets=["sums-table"])}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages
"""

#: A user's own producer: each depth query logs its process, and a query at three messages blocks
#: for as long as a test wants.
WATCHED_PRODUCER = """\
import os
import threading
import time
from pathlib import Path

from airflow_broadway.core.model.options import options
from airflow_broadway.producers import SqliteProducer

SIGNS = Path(os.environ["SIGNS"])


@options
class WatchedProducer(SqliteProducer):
    def depth(self, env):
        queue_depth = SqliteProducer.depth(self, env)
        if threading.current_thread().name == "broadway-backlog":
            with (SIGNS / "looks").open("a") as file:
                file.write(f"{os.getpid()}\\n")
            if queue_depth.ready >= 3 and (SIGNS / "hold").exists():
                (SIGNS / "hold").rename(SIGNS / "held")
                while (SIGNS / "held").exists():
                    time.sleep(0.05)
        return queue_depth
"""

WATCHED = """\
import time
from pathlib import Path

from airflow_broadway import Batcher, Broadway
from watched_producer import SIGNS, WatchedProducer


class Watched(Broadway):
    producer = WatchedProducer(queue="watched", conn_id="the_queue", lease=60.0)
    batchers = {"default": Batcher(engine="python")}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, batch_info, context):
        while (SIGNS / "busy").exists():
            (SIGNS / "at work").touch()
            time.sleep(0.1)
        return messages
"""

DAGS = """\
from airflow.sdk import DAG, Asset, task

from airflow_broadway import backlog
from airflow_broadway.sensors.backlog import BroadwayBacklogSensor
from sums_pipeline import Sums
from watched_pipeline import Watched

Sums.dag("sums", schedule=backlog(min_messages=3, poke_interval=1.0))
Watched.dag("watched", schedule=backlog(min_messages=3, poke_interval=1.0))

with DAG("waits", schedule=None):
    BroadwayBacklogSensor(
        task_id="wait", pipeline=Sums, min_messages=2, poke_interval=1.0, deferrable=True
    )
"""

#: Seconds without a heartbeat after which a triggerer counts as dead.
DEAD_AFTER = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("events")
    for name in ("dags", "installed", "signs"):
        (path / name).mkdir()
    return path


@pytest.fixture(scope="module")
def queue(folder):
    with SqliteQueue(folder / "queue.db", "sums") as queue:
        yield queue


@pytest.fixture(scope="module")
def airflow(folder, queue):
    (folder / "dags" / "sums_pipeline.py").write_text(PIPELINE)
    (folder / "dags" / "watched_pipeline.py").write_text(WATCHED)
    (folder / "dags" / "events.py").write_text(DAGS)
    (folder / "installed" / "watched_producer.py").write_text(WATCHED_PRODUCER)
    env = airflow_env(
        home=made_home(folder / "home"),
        dags=folder / "dags",
        port=free_port(),
        settings={
            "triggerer.job_heartbeat_sec": "1",
            "triggerer.triggerer_health_check_threshold": str(DEAD_AFTER),
        },
    )
    connection = {"conn_type": "broadway_sqlite", "host": str(queue.path)}
    env["AIRFLOW_CONN_THE_QUEUE"] = json.dumps(connection)
    env["SIGNS"] = str(folder / "signs")
    # Modules next to the Dag files are not on the path of Airflow's processes, as in production.
    env["PYTHONPATH"] = f"{env['PYTHONPATH'].split(':')[0]}:{folder / 'installed'}"
    with LocalAirflow(env, folder / "logs") as airflow:
        airflow.wait_for_dag("sums")
        yield airflow


def runs(airflow: LocalAirflow, dag_id: str = "sums") -> list[dict[str, Any]]:
    response: dict[str, Any] = airflow.api("GET", f"/dags/{dag_id}/dagRuns", order_by="run_after")
    return list(response["dag_runs"])


def events(airflow: LocalAirflow, asset: str) -> list[dict[str, Any]]:
    response: dict[str, Any] = airflow.api("GET", "/assets/events", limit=100, order_by="timestamp")
    return [event for event in response["asset_events"] if event["name"] == asset]


def wait_for_run_end(airflow: LocalAirflow, number: int, dag_id: str = "sums") -> dict[str, Any]:
    """Waits for the ``number``-th run of the Dag to end; returns it."""
    eventually(lambda: len(runs(airflow, dag_id)) >= number, timeout=120.0)
    run = runs(airflow, dag_id)[number - 1]
    assert airflow.wait_for_run(dag_id, run["dag_run_id"]) == "success"
    return run


def process_state(airflow: LocalAirflow, run: dict[str, Any]) -> str:
    """Returns the state of a run's process task."""
    tasks = airflow.task_instances(run["dag_id"], run["dag_run_id"])
    [state] = [task["state"] for task in tasks if task["task_id"] == "broadway.process"]
    return str(state)


def log_of(airflow: LocalAirflow, run: dict[str, Any]) -> str:
    folder = airflow.home / "logs" / f"dag_id={run['dag_id']}" / f"run_id={run['dag_run_id']}"
    return "".join(path.read_text() for path in folder.rglob("*.log"))


def test_events_start_runs_that_handle_each_message_once(airflow, queue):
    # Given a backlog below the bound, and a few depth queries
    queue.send([b"1", b"2"])
    time.sleep(5.0)
    assert runs(airflow) == []

    # When one more message arrives
    queue.send([b"3"])

    # Then one event starts one run, which acks them all
    run = wait_for_run_end(airflow, 1)
    assert run["run_type"] == "asset_triggered"
    assert queue.depth()[:4] == (0, 0, 0, 0)
    [event] = events(airflow, "sums.Sums.backlog")
    payload = event["extra"]["payload"]
    assert (payload["ready"], payload["reason"]) == (3, "3 messages (min_messages=3)")
    # and the batcher's outlet has an event for its batches
    [produced] = events(airflow, "sums-table")
    assert (produced["extra"]["successful"], len(produced["extra"]["batch_ids"])) == (3, 1)

    # When an event from before the run is repeated, as by a second triggerer
    queue.send([b"4"])
    body = {"asset_id": event["asset_id"], "extra": {"payload": payload}}
    airflow.api("POST", "/assets/events", body)

    # Then its run ends immediately, receives nothing, and logs the reason
    second = wait_for_run_end(airflow, 2)
    assert queue.depth().ready == 1
    assert process_state(airflow, second) == "skipped"
    assert f"The run {run['dag_run_id']} began at" in log_of(airflow, second)

    # When more arrive while the Dag is paused, and for longer than its watcher lives then
    airflow.pause("sums")
    queue.send([b"5", b"6", b"7"])
    time.sleep(20.0)
    assert len(runs(airflow)) == 2

    # Then they are handled once it is unpaused
    airflow.pause("sums", False)
    wait_for_run_end(airflow, 3)
    assert queue.depth()[:4] == (0, 0, 0, 0)


def test_a_deferred_sensor_waits_in_the_triggerer(airflow, queue):
    airflow.wait_for_dag("waits")
    run = airflow.trigger("waits")
    airflow.wait_for_task("waits", run, "wait", ("deferred",))

    queue.send([b"1", b"2"])

    assert airflow.wait_for_run("waits", run) == "success"
    assert queue.depth().ready == 2


# -- depths and triggerers ------------------------------------------------------------------------


class World:
    """The Dag ``watched``: its queue, runs and events, and the processes that read its depth."""

    def __init__(self, airflow: LocalAirflow, folder: Path, queue: SqliteQueue) -> None:
        self.airflow = airflow
        self.signs = folder / "signs"
        self.database = folder / "home" / "airflow.db"
        self.queue = queue
        # Those of earlier tests
        self._runs, self._events = len(self.runs), len(self.events)

    @property
    def runs(self) -> list[dict[str, Any]]:
        return runs(self.airflow, "watched")

    @property
    def events(self) -> list[dict[str, Any]]:
        return events(self.airflow, "watched.Watched.backlog")

    @property
    def new(self) -> tuple[int, int]:
        """The numbers of runs and events since the test began."""
        return len(self.runs) - self._runs, len(self.events) - self._events

    def send(self, number: int) -> None:
        self.queue.send(str(n).encode() for n in range(number))

    def wait_for_event(self, number: int, *, timeout: float = 120.0) -> dict[str, Any]:
        """Waits for the ``number``-th event of the test; returns its payload."""
        eventually(lambda: self.new[1] >= number, timeout=timeout)
        payload: dict[str, Any] = self.events[self._events + number - 1]["extra"]["payload"]
        return payload

    def wait_for_run_end(self, number: int) -> dict[str, Any]:
        """Waits for the ``number``-th run of the test to end; returns it."""
        return wait_for_run_end(self.airflow, self._runs + number, "watched")

    def looks(self) -> list[int]:
        """Returns the process of each depth query."""
        path = self.signs / "looks"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_looks(self, number: int) -> None:
        """Waits for so many complete depth queries."""
        enough = len(self.looks()) + number + 1
        eventually(lambda: len(self.looks()) >= enough, timeout=120.0)

    @property
    def triggerer(self) -> psutil.Process:
        """The triggerer of the latest depth query."""
        parent = psutil.Process(self.looks()[-1]).parent()
        assert parent is not None
        return parent

    @contextmanager
    def suspend(self, process: psutil.Process, *, whole: bool = False) -> Iterator[None]:
        """Suspends a process inside the block, at a time when it holds no database lock.

        :param whole: Whether its children are suspended, too.
        """
        processes = [process, *(process.children(recursive=True) if whole else ())]
        while not self._try_suspend(processes):
            continue
        try:
            yield
        finally:
            for member in processes:
                member.resume()

    def _try_suspend(self, processes: Sequence[psutil.Process]) -> bool:
        for member in processes:
            member.suspend()
        for database in (self.database, self.queue.path):
            with closing(sqlite3.connect(database, timeout=2.0, isolation_level=None)) as db:
                try:
                    db.execute("BEGIN EXCLUSIVE")
                except sqlite3.OperationalError:
                    for member in processes:
                        member.resume()
                    return False
        return True

    def component(self, name: str) -> psutil.Process:
        return psutil.Process(self.airflow.processes[name].pid)


@pytest.fixture
def world(airflow, folder):
    airflow.wait_for_dag("watched")
    with SqliteQueue(folder / "queue.db", "watched") as queue:
        yield World(airflow, folder, queue)


@pytest.fixture
def second_triggerer(airflow, folder):
    """A second triggerer, on the same database."""
    with (folder / "logs" / "second.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow", "triggerer", "--skip-serve-logs"],
            env=airflow.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60.0)


def test_a_dag_at_its_run_limit_gets_its_backlog_in_the_next_run(world):
    # Given an active run, the only one that the Dag may have
    (world.signs / "busy").touch()
    world.send(3)
    world.wait_for_event(1)
    eventually((world.signs / "at work").exists, timeout=120.0)

    # When as many messages arrive again
    world.send(3)

    # Then no event is sent meanwhile
    world.wait_for_looks(4)
    assert world.new == (1, 1)

    # And once it has ended the next run receives them
    (world.signs / "busy").unlink()
    world.wait_for_run_end(1)
    world.wait_for_run_end(2)
    assert [world.wait_for_event(number)["reports"] for number in (1, 2)] == [1, 1]
    assert world.new == (2, 2)
    assert world.queue.depth()[:4] == (0, 0, 0, 0)


def test_events_dropped_while_a_dag_is_paused_are_sent_again(world):
    # Given a Dag that was paused a moment ago: its trigger still exists
    with world.suspend(world.component("dag-processor")):
        world.airflow.pause("watched")

        # When a backlog is reported
        world.send(3)
        first = world.wait_for_event(1)

        # Then no run follows, not even when the Dag is unpaused
        world.wait_for_looks(2)
        world.airflow.pause("watched", False)
        world.wait_for_looks(2)
        assert world.new == (0, 1)

        # And it is reported again
        again = world.wait_for_event(2)
    assert (again["crossing"], again["reports"]) == (first["crossing"], 2)
    world.wait_for_run_end(1)
    assert world.queue.depth()[:4] == (0, 0, 0, 0)


@pytest.mark.usefixtures("second_triggerer")
def test_two_triggerers_start_one_run_per_crossing(world):
    # Given a scheduler that is slow, and a reported crossing
    with ExitStack() as hung:
        with world.suspend(world.component("scheduler")):
            world.send(3)
            world.wait_for_event(1)
            hung_triggerer = world.triggerer

            # When its triggerer hangs, and the second one takes over
            hung.enter_context(world.suspend(hung_triggerer, whole=True))
            world.wait_for_event(2)
            active_triggerer = world.triggerer
            assert active_triggerer != hung_triggerer
            assert world.new == (0, 2)

        # Then one run serves both events
        world.wait_for_run_end(1)
        assert world.queue.depth()[:4] == (0, 0, 0, 0)
    # also when both are active again
    world.wait_for_looks(3)
    assert world.new == (1, 2)

    # Given a reported crossing, and another triggerer with a slow depth query
    with ExitStack() as hung:
        with world.suspend(world.component("scheduler")):
            world.send(3)
            world.wait_for_event(3)
            hung.enter_context(world.suspend(world.triggerer, whole=True))
            (world.signs / "hold").touch()
            eventually((world.signs / "held").exists, timeout=120.0)

        # When that query returns after a run has received all
        first = world.wait_for_run_end(2)
        assert world.queue.depth()[:4] == (0, 0, 0, 0)
        world.send(1)
        (world.signs / "held").unlink()

        # Then the run of its event ends immediately, receives nothing, and logs the reason
        second = world.wait_for_run_end(3)
    assert process_state(world.airflow, first) == "success"
    assert process_state(world.airflow, second) == "skipped"
    assert f"3 messages (min_messages=3).  The run {first['dag_run_id']} began at" in log_of(
        world.airflow, second
    )
    assert world.queue.depth()[:4] == (1, 0, 0, 0)
    world.wait_for_looks(3)
    assert world.new == (3, 4)
