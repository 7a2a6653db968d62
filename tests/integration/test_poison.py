"""A payload that ends the Spark driver: real drivers, over one warm JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.parts import part_id
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import load_ref
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.spark_batches import Ending, SparkBatches
from airflow_broadway.spark.job import arguments_of
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing.crashes.spark import warm_spark
from tests.deaths import WAYS
from tests.unit.runs.steps import Run
from tests.unit.spark.plans import Planned, Row, Staged

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PIPELINE = """
import os

from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.custody.producer import Producer
from tests.deaths import die


class Deadly(Broadway):
    producer = Producer(max_crashes=2)
    batchers = {"default": Batcher(schema="n bigint")}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, info, context):
        numbers = sorted(row.n for row in messages.select("data.n").collect())
        with open(os.environ["DEADLY_LOG"], "a") as file:
            print(info.batch_id, numbers, file=file)
        if int(os.environ["DEADLY"]) in numbers:
            die(os.environ["DEADLY_WAY"])
"""
KILLED = """
import os
import time
from pathlib import Path

from airflow_broadway import Batcher, Broadway
from airflow_broadway.producers.sqlite import SqliteProducer


class Killed(Broadway):
    name = "Sums"
    producer = SqliteProducer(queue="sums", path="/replaced", max_crashes={crashes})
    batchers = {"default": Batcher(schema="n bigint", batch_size=5)}

    def handle_message(self, processor, message, context):
        return message.put_data({"n": int(message.data)})

    def handle_batch(self, batcher, messages, info, context):
        numbers = sorted(row.n for row in messages.select("data.n").collect())
        with open(os.environ["DEADLY_LOG"], "a") as file:
            print(info.batch_id, numbers, file=file)
        while Path(os.environ["HOLD"]).exists():
            time.sleep(0.02)
"""
REF = {"class": "deadly_pipeline:Deadly", "options": {}}
DRIVER = "import sys\nfrom airflow_broadway.testing.crashes.spark import run_driver\n"
DRIVER += "sys.exit(run_driver(sys.argv[1:]))"


@pytest.fixture(scope="module")
def jvm():
    with warm_spark():
        yield


class Task:
    """The task that has Spark handle a plan, in one execution."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        planned: list[Planned],
        *,
        deadly: int,
        way: str,
    ) -> None:
        (folder / "deadly_pipeline.py").write_text(PIPELINE)
        monkeypatch.syspath_prepend(str(folder))
        self.log = folder / "log"
        monkeypatch.setenv("DEADLY", str(deadly))
        monkeypatch.setenv("DEADLY_WAY", way)
        monkeypatch.setenv("DEADLY_LOG", str(self.log))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        store = Store.open(f"file://{folder}/staging")
        self.run = StagedRun(store, pipeline="Deadly", dag_id="d", run_id="r")
        self.staged = Staged(folder / "staging" / self.run.path, pipeline="Deadly")
        self.staged.root_id = store.root_id()
        self.plan = self.staged.plan("default", planned)

    def execute(self) -> list[int]:
        """Starts drivers until no work is left; returns their exit codes."""
        name = "handle_batches"
        batches = SparkBatches(
            self.run, load_ref(REF, RunInfo()), [{"plan": self.plan.path}], Ports(), name=name
        )
        assert batches.begin() is Ending.OPEN
        codes = []
        has_work = batches.isolation.choose()
        while has_work:
            path, work = batches.write_work(name, REF, RunInfo())
            argv = [sys.executable, "-c", DRIVER, *arguments_of(self.run.spark_uri(), path, work)]
            codes.append(subprocess.run(argv, check=False, capture_output=True).returncode)
            has_work = batches.isolation.goes_on() and batches.isolation.choose()
        assert batches.end() is Ending.DONE
        return codes

    def seen(self) -> list[list[Any]]:
        """Returns the id and the numbers of each batch that was begun, in order."""
        lines = [line.split(" ", 1) for line in self.log.read_text().splitlines()]
        return [[batch, json.loads(numbers)] for batch, numbers in lines]

    def entries(self) -> list[dict[str, Any]]:
        """Returns the lines of the outcomes, one per message."""
        outcomes: dict[str, Outcome] = self.staged.outcomes("default")
        return [json.loads(line) for outcome in outcomes.values() for line in outcome.lines or ()]


def row(number: int) -> Row:
    return Row(f"m{number}", {"n": number}, receipt=f"r{number}")


def test_a_payload_that_exits_the_driver_is_dead_lettered_alone(jvm, tmp_path, monkeypatch):
    # Given two batches, in one of which a message makes the driver exit
    planned = [Planned("b0", [row(1), row(2), row(3)]), Planned("b1", [row(4)])]
    task = Task(tmp_path, monkeypatch, planned, deadly=2, way="exit")

    # When the task continues until no work is left
    codes = task.execute()

    # Then halving has isolated that message, and all others were handled
    lower, upper = part_id("b0", 0), part_id("b0", 1)
    assert task.seen() == [
        ["b0", [1, 2, 3]],
        ["b0", [1, 2, 3]],
        ["b1", [4]],
        ["b0", [1, 2, 3]],
        [upper, [2, 3]],
        [lower, [1]],
        [part_id(upper, 0), [2]],
        [part_id(upper, 1), [3]],
        [part_id(upper, 0), [2]],
        [part_id(upper, 0), [2]],
    ]
    assert codes.count(9) == len(codes) - codes.count(0)
    outcomes: dict[str, Outcome] = task.staged.outcomes("default")
    assert outcomes["b1"].successful == outcomes[lower].successful == 1
    [line] = outcomes[part_id(upper, 0)].lines or [""]
    assert json.loads(line)["action"] == "dead_letter"
    assert json.loads(line)["reason"] == "crashed: it ended 2 processes that handled nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_poison_message_of_a_thousand_is_isolated_in_one_execution(
    jvm, tmp_path, monkeypatch, way
):
    planned = [
        Planned(f"b{number}", [row(number * 100 + n) for n in range(100)]) for number in range(10)
    ]
    task = Task(tmp_path, monkeypatch, planned, deadly=537, way=way)
    codes = task.execute()

    # Deaths: two among the others, one alone, a half each time, and two of the message alone
    assert 0 < len(codes) - codes.count(0) <= 13
    [entry] = task.entries()
    assert (entry["id"], entry["action"]) == ("m537", "dead_letter")
    assert entry["reason"] == "crashed: it ended 2 processes that handled nothing else"
    handled = sum(outcome.successful for outcome in task.staged.outcomes("default").values())
    assert handled == 999


@pytest.mark.slow
@pytest.mark.timeout(900)  # eight drivers
@pytest.mark.parametrize(("count", "crashes"), [(40, 1), (1, 5)])
def test_outside_kills_release_messages_and_blame_none(jvm, tmp_path, monkeypatch, count, crashes):
    # Given good messages in batches on Spark
    (tmp_path / "killed_pipeline.py").write_text(KILLED.replace("{crashes}", str(crashes)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    log, hold = tmp_path / "log", tmp_path / "hold"
    monkeypatch.setenv("DEADLY_LOG", str(log))
    monkeypatch.setenv("HOLD", str(hold))
    log.touch()
    monkeypatch.delitem(sys.modules, "killed_pipeline", raising=False)
    killed = resolve_name("killed_pipeline:Killed")
    options = {"producer": {"path": str(tmp_path / "queue.db")}}
    ref = {"class": "killed_pipeline:Killed", "options": options}

    def run_once(run: Run, kills: int) -> Ending:
        """Runs the batches; kills so many applications, each at its first batch."""
        reference = run.process()
        plan = plan_batches(
            run.staged, run.pipeline, "default", [reference["generation"]], try_label="1"
        )
        name, info = "handle_batches", RunInfo(dag_id="sums", run_id=run.run_id)
        batches = SparkBatches(
            run.staged, run.pipeline, [{"plan": plan.path}], run.ports, name=name, most=3
        )
        assert batches.begin() is Ending.OPEN
        has_work = batches.isolation.choose()
        while has_work:
            path, work = batches.write_work(name, ref, info)
            arguments = arguments_of(run.staged.spark_uri(), path, work)
            seen = log.stat().st_size
            with subprocess.Popen([sys.executable, "-c", DRIVER, *arguments]) as driver:
                while kills and log.stat().st_size == seen and driver.poll() is None:
                    time.sleep(0.02)
                if kills:
                    driver.kill()
                    kills -= 1
            has_work = batches.isolation.goes_on() and batches.isolation.choose()
        ending = batches.end()
        assert run.ack()["balanced"]
        return ending

    # When six of their applications are killed in two runs
    run_ids = ["manual__1", "manual__2", "manual__3"]
    runs = [
        Run(tmp_path, run_id, pipeline=killed, finished=run_ids[:number])
        for number, run_id in enumerate(run_ids)
    ]
    runs[0].send(range(count))
    hold.touch()
    for run in runs[:2]:
        assert run_once(run, 3) is not Ending.DONE
        assert run.dead() == []
        assert run.depth() == (count, 0, 0, 0)

    # Then the next run handles them all
    hold.unlink()
    assert run_once(runs[2], 0) is Ending.DONE
    assert runs[2].depth() == (0, 0, 0, 0)
