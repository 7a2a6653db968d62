"""A message that kills its process, under a real scheduler, of tasks that are never retried."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env, home_of
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

DAG = """\
import os
import time

from airflow.sdk import DAG
from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.producers.sqlite import SqliteProducer


def note(name, numbers):
    with open(os.path.join(os.environ["POISON_FOLDER"], name), "a") as file:
        file.write("".join(f"{n}\\n" for n in numbers))


class Poisoned(Broadway):
    producer = SqliteProducer(
        queue="numbers", path=os.path.join(os.environ["POISON_FOLDER"], "queue.db")
    )
    processors = Processors(concurrency=1, max_demand=200)
    batchers = {"default": Batcher(engine="python", batch_size=100, batch_timeout=None)}

    def handle_message(self, processor, message: Message, context):
        return message.put_data(int(message.data))

    def handle_batch(self, batcher, messages, batch_info, context):
        numbers = [message.data for message in messages]
        note("begun", numbers)
        if os.path.exists(os.path.join(os.environ["POISON_FOLDER"], "slow")):
            time.sleep(60)
        if 537 in numbers:
            os._exit(9)
        note("handled", numbers)
        return messages


with DAG("poisoned", schedule=None, max_active_runs=1):
    Poisoned().task_group(default_args={"retries": 0})
"""

COUNT, POISON = 1_000, 537


class World:
    """An Airflow, and the queue whose messages its Dag receives."""

    def __init__(self, folder: Path, airflow: LocalAirflow) -> None:
        self.folder, self.airflow = folder, airflow
        self.queue = SqliteQueue(folder / "queue.db", "numbers")
        self.runs = 0

    def empty(self) -> None:
        """Receives and acknowledges all messages of the queue."""
        with sqlite3.connect(self.folder / "queue.db") as db:
            db.execute("DELETE FROM messages")

    def begin(self) -> str:
        self.runs += 1
        return self.airflow.trigger("poisoned")

    def run(self) -> None:
        """Triggers a run, and waits for its end in any state."""
        self.airflow.wait_for_run("poisoned", self.begin(), timeout=200)

    def kill(self, task: str, run_id: str, condition: Callable[[], bool]) -> None:
        """Kills a task's processes, except its supervisor, on a condition; waits for the run."""
        deadline = time.monotonic() + 100
        while not condition() or not (processes := self._children(run_id, task)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        self.airflow.wait_for_run("poisoned", run_id, timeout=200)

    def _children(self, run_id: str, task_id: str) -> list[psutil.Process]:
        task = str(self.airflow.task_instance("poisoned", run_id, task_id)["id"])
        children = []
        for process in self.airflow.processes_of_tasks():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if task in line and not line.startswith("airflow worker -- LocalExecutor"):
                children.append(process)
        return children

    def noted(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def check(self) -> None:
        """Checks that all but one are handled and acked; that one is a dead letter with reason."""
        depth = self.queue.depth()
        assert (depth.ready, depth.delayed, depth.leased, depth.dead) == (0, 0, 0, 1)
        [letter] = self.queue.dead_letters()
        assert int(letter.body) == POISON
        assert letter.reason == "crashed: it ended 5 processes that handled nothing else"
        assert set(self.noted("handled")) == set(range(COUNT)) - {POISON}


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poison")
    (folder / "dags").mkdir()
    (folder / "dags" / "poisoned.py").write_text(DAG)
    settings = {
        "broadway.staging": f"file://{folder / 'staging'}",
        "scheduler.task_instance_heartbeat_timeout": "12",
        "scheduler.task_instance_heartbeat_timeout_detection_interval": "2",
    }
    home = made_home(home_of(ROOT, "airflow-test-poison"))
    env = airflow_env(home=home, dags=folder / "dags", port=free_port(), settings=settings)
    env["POISON_FOLDER"] = str(folder)
    with LocalAirflow(env, folder / "logs") as airflow:
        airflow.wait_for_dag("poisoned", timeout=120)
        yield folder, airflow


@pytest.fixture
def world(airflow):
    folder, running = airflow
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    world = World(folder, running)
    world.queue.send([b"%d" % number for number in range(COUNT)])
    yield world
    world.queue.close()


@pytest.mark.timeout(900)
def test_without_retries_the_second_run_dead_letters_a_poison_message(world):
    world.run()
    assert world.queue.depth().dead == 0
    world.run()
    world.check()


@pytest.mark.timeout(900)
def test_outside_kills_while_isolating_lose_nothing(world):
    # Given a first run whose sensor is killed when the batch task has died
    run_id = world.begin()
    world.kill("broadway.ack", run_id, lambda: POISON in world.noted("begun"))

    # And a second run that is killed while it isolates the message
    run_id = world.begin()
    world.kill("broadway.batch.default", run_id, lambda: world.noted("begun").count(POISON) > 1 + 2)

    # Then at most two more runs settle all messages
    while world.runs < 2 + 2 and any(world.queue.depth()[:3]):
        world.run()
    world.check()


@pytest.mark.timeout(900)
def test_five_outside_kills_blame_no_message(world):
    # Given one harmless message
    world.empty()
    world.queue.send([b"1"])
    (world.folder / "slow").touch()

    # When the batch task is killed in each of five runs while it handles the message
    for _ in range(5):
        (world.folder / "begun").unlink(missing_ok=True)
        run_id = world.begin()
        world.kill("broadway.batch.default", run_id, lambda: bool(world.noted("begun")))
        assert world.queue.depth()[:4] == (1, 0, 0, 0)

    # Then the first quiet run handles it
    (world.folder / "slow").unlink()
    world.run()
    assert world.noted("handled") == [1]
    assert world.queue.depth() == (0, 0, 0, 0, None)
