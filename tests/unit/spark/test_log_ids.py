"""Ids in the log lines of the Spark driver, without Spark."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.log_context import log_plainly
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.batch import BatchRunner
from airflow_broadway.spark.session import INCOMPLETE, ClassicSessions
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows

#: A session without a JVM, as far as a driver uses it.
Session: Any = type("Session", (), {"sparkContext": SimpleNamespace(applicationId="app-1")})


def outcome(planned: PlannedBatch, plan: BatchPlan) -> Outcome:
    return Outcome(
        batch_id=planned.batch_id, batcher="wide", plan=plan.path, successful=1, failed=0
    )


def test_log_lines_name_run_and_batch(tmp_path, monkeypatch, capsys):
    # Given a plan of two batches
    broken = ""
    staged = Staged(tmp_path)
    plan = staged.plan("wide", [Planned(f"b{n}", rows(1, prefix=f"b{n}-")) for n in range(2)])
    info = RunInfo(dag_id="shop", run_id="manual__1")
    work = replace(staged.work(Counting, plan), run=info.to_json())

    def handled(self, planned, *, lane=0):
        logging.getLogger("user").info("called")
        if planned.batch_id == broken:
            raise ZeroDivisionError
        return outcome(planned, plan)

    monkeypatch.setattr(BatchRunner, "run", handled)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    log_plainly("%(message)s")

    # When the driver runs them
    session = Session()
    assert run_work(ClassicSessions(session), staged.uri, staged.files, work) == 0

    # Then all lines end with the ids, in the callback's thread as well
    run = "dag_id='shop' run_id='manual__1'"
    lines = capsys.readouterr().err.splitlines()
    batches = [f"{run} batcher='wide' batch_id='b{n}'" for n in range(2)]
    assert sorted(line for line in lines if line.startswith("called")) == [
        f"called [{ids}]" for ids in batches
    ]
    progress = sorted(line for line in lines if line.startswith("wide b"))
    assert [line.partition(" [")[2] for line in progress] == [f"{ids}]" for ids in batches]
    (total,) = [line for line in lines if line.startswith("2 batches")]
    assert total.endswith(f"[{run}]")

    # And an error that ends the driver in a batch names the batch
    broken = "b1"
    assert (
        run_work(ClassicSessions(session), staged.uri, staged.files, replace(work, try_number=2))
        == INCOMPLETE
    )
    assert f"ZeroDivisionError [{batches[1]}]" in capsys.readouterr().err
