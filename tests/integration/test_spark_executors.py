"""Executors that die, in a small cluster of their own: its driver, a worker, an executor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.spark.application import run_work
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.unit.spark.session import local_cluster_env, run_application

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(540)]

#: An expression that ends the process that computes it.
EXIT = "java_method('java.lang.System', 'exit', 1)"


def application(root: Path) -> None:
    """Handles two batches, of which one kills every executor that works on it."""
    from airflow_broadway.spark.session import ClassicSessions, open_session

    os.environ |= local_cluster_env()

    def callback(messages: Any, info: BatchInfo) -> None:
        (messages.selectExpr(EXIT) if info.batch_id == "b0" else messages).collect()

    Counting.callback = staticmethod(callback)
    staged = Staged(root)
    plan = staged.plan("default", [Planned(f"b{n}", rows(5, prefix=f"b{n}-")) for n in range(2)])
    session = open_session()
    code = run_work(ClassicSessions(session), staged.uri, staged.files, staged.work(Counting, plan))
    session.stop()
    outcomes = {
        name: [outcome.successful, outcome.failed, outcome.error]
        for name, outcome in staged.outcomes("default").items()
    }
    (root / "result.json").write_text(json.dumps([code, outcomes]))


def test_a_batch_with_repeatedly_dying_executors_fails_alone(tmp_path):
    code, outcomes = run_application(__name__, tmp_path)
    assert (code, outcomes["b1"]) == (0, [5, 0, ""])
    assert outcomes["b0"][:2] == [0, 5]
    assert "Job aborted due to stage failure" in outcomes["b0"][2]


if __name__ == "__main__":
    application(Path(sys.argv[1]))
