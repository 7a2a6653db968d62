"""The batcher operator on a run that is settled."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowSkipException

from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.runs.outcomes import run_again_command
from tests.cli_runs import DAG_ID, RUN_ID, make_shop


def test_batcher_cleared_after_settlement_is_skipped_with_a_rerun_command(tmp_path, monkeypatch):
    shop = make_shop(tmp_path, monkeypatch)
    shop.send([{"n": 1, "shop": "a"}])
    run = shop.settled_run()
    shop.calls()
    [generation] = [record.generation for record in run.generations()]
    operator = BroadwayBatcherOperator(
        task_id="batch",
        pipeline=shop.ref,
        batcher="default",
        processed={"generation": generation, "batchers": {"default": 7}},
        staging=shop.staging,
    )
    pushed: list[Any] = []
    ti = SimpleNamespace(
        dag_id=DAG_ID,
        run_id=RUN_ID,
        task_id="batch",
        map_index=-1,
        try_number=2,
        id="x",
        xcom_push=lambda key, value: pushed.append(value["plan"]),
    )
    dates = dict.fromkeys(("logical_date", "data_interval_start", "data_interval_end"))
    context: Any = {"ti": ti, "dag_run": SimpleNamespace(**dates), "params": {}}
    command = re.escape(run_again_command(DAG_ID, RUN_ID))
    assert command.startswith(f"airflow\\ dags\\ trigger\\ {DAG_ID}")
    with pytest.raises(AirflowSkipException, match=f"are settled, or were released.*{command}"):
        operator.execute(context)
    assert shop.calls() == []
    assert pushed == [None]
