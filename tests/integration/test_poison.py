"""A payload that makes the Spark driver exit: real drivers, over one JVM that stays warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.parts import part_id
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import load_ref
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.spark_batches import Ending, SparkBatches
from airflow_broadway.spark.job import arguments_of
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing.crashes.spark import warm_spark
from tests.unit.spark.plans import Planned, Row, Staged

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PIPELINE = """
import os

from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.custody.producer import Producer


class Deadly(Broadway):
    producer = Producer(max_crashes=2)
    batchers = {"default": Batcher(schema="n bigint")}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, info, context):
        numbers = sorted(row.n for row in messages.select("data.n").collect())
        with open(os.environ["DEADLY_LOG"], "a") as file:
            print(info.batch_id, numbers, file=file)
        if 2 in numbers:
            os._exit(9)
"""
REF = {"class": "deadly_pipeline:Deadly", "options": {}}
DRIVER = "import sys\nfrom airflow_broadway.testing.crashes.spark import be_driver\n"
DRIVER += "sys.exit(be_driver(sys.argv[1:]))"


@pytest.fixture(scope="module")
def jvm() -> Iterator[None]:
    with warm_spark():
        yield


def row(number: int) -> Row:
    return Row(f"m{number}", {"n": number}, receipt=f"r{number}")


def test_a_driver_that_exits_on_a_payload_takes_no_neighbour_along(
    jvm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two batches, in one of which a message makes the driver exit
    (tmp_path / "deadly_pipeline.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DEADLY_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    store = Store.open(f"file://{tmp_path}/staging")
    run = StagedRun(store, pipeline="Deadly", dag_id="d", run_id="r")
    staged = Staged(tmp_path / "staging" / run.path, pipeline="Deadly")
    staged.root_id = store.root_id()
    planned = [Planned("b0", [row(1), row(2), row(3)]), Planned("b1", [row(4)])]
    plan = staged.plan("default", planned)

    # When the task goes on until nothing is left
    batches = SparkBatches(
        run, load_ref(REF, RunInfo()), [{"plan": plan.path}], Ports(), name="handle_batches"
    )
    assert batches.begin() is Ending.OPEN
    codes = []
    there = batches.choose()
    while there:
        path, work = batches.write_work("handle_batches", REF, RunInfo())
        words = [sys.executable, "-c", DRIVER, *arguments_of(run.spark_uri(), path, work)]
        codes.append(subprocess.run(words, check=False, capture_output=True).returncode)
        there = batches.goes_on() and batches.choose()

    # Then the deaths were found out one by one, and all but that message were handled
    assert batches.end() is Ending.DONE
    seen = [line.split(" ", 1) for line in (tmp_path / "log").read_text().splitlines()]
    lower, upper = part_id("b0", 0), part_id("b0", 1)
    assert [[batch, json.loads(numbers)] for batch, numbers in seen] == [
        ["b0", [1, 2, 3]],
        ["b0", [1, 2, 3]],
        ["b1", [4]],
        ["b0", [1, 2, 3]],
        [upper, [2, 3]],
        [lower, [1]],
        [part_id(upper, 0), [2]],
        [part_id(upper, 1), [3]],
        [part_id(upper, 0), [2]],
    ]
    assert codes.count(9) == len(codes) - codes.count(0)
    found: dict[str, Outcome] = staged.outcomes("default")
    assert found["b1"].successful == found[lower].successful == 1
    [line] = found[part_id(upper, 0)].lines or [""]
    assert json.loads(line)["action"] == "dead_letter"
    assert json.loads(line)["reason"].startswith("crashed: its process died 2 times")
