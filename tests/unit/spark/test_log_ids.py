"""What a line of the Spark driver's log names, without Spark."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import PlannedBatch
from airflow_broadway.core.log_context import log_plainly
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.batch import BatchRunner
from airflow_broadway.spark.session import INCOMPLETE
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows

#: What a driver asks of a session that has no JVM.
Session = type("Session", (), {"sparkContext": SimpleNamespace(applicationId="app-1")})


def test_each_line_names_the_run_and_that_of_a_batch_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given a plan of two batches
    broken = ""
    staged = Staged(tmp_path)
    plan = staged.plan("wide", [Planned(f"b{n}", rows(1, prefix=f"b{n}-")) for n in range(2)])
    info = RunInfo(dag_id="shop", run_id="manual__1")
    work = replace(staged.work(Counting, plan), run=info.to_json())

    def handled(self: BatchRunner, planned: PlannedBatch, *, lane: int = 0) -> Outcome:
        logging.getLogger("user").info("called")
        if planned.batch_id == broken:
            raise ZeroDivisionError
        return Outcome(
            batch_id=planned.batch_id, batcher="wide", plan=plan.path, successful=1, failed=0
        )

    monkeypatch.setattr(BatchRunner, "run", handled)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    log_plainly("%(message)s")

    # When the driver runs them
    session: Any = Session()
    assert run_work(session, staged.uri, staged.files, work) == 0

    # Then each line ends with the ids, in the callback's thread as well
    run = "dag_id='shop' run_id='manual__1'"
    lines = capsys.readouterr().err.splitlines()
    batches = [f"{run} batcher='wide' batch_id='b{n}'" for n in range(2)]
    assert sorted(each for each in lines if each.startswith("called")) == [
        f"called [{ids}]" for ids in batches
    ]
    progress = sorted(each for each in lines if each.startswith("wide b"))
    assert [each.partition(" [")[2] for each in progress] == [f"{ids}]" for ids in batches]
    (total,) = [each for each in lines if each.startswith("2 batches")]
    assert total.endswith(f"[{run}]")

    # And what ends the driver in a batch names it
    broken = "b1"
    assert run_work(session, staged.uri, staged.files, replace(work, try_number=2)) == INCOMPLETE
    assert f"ZeroDivisionError [{batches[1]}]" in capsys.readouterr().err
