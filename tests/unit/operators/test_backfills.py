"""A run of type backfill: which producers serve it, its interval, and its budgets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_broadway.adapters.task import backfilled, task_of
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.pull import budget_of, refuse_backfill
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from tests.unit.runs.steps import Sums

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
HOUR = (NOON, NOON + timedelta(hours=1))


def context(
    run_type: str, interval: tuple[datetime, datetime] | tuple[None, None] = HOUR
) -> dict[str, Any]:
    start, end = interval
    run = SimpleNamespace(
        run_type=run_type, run_id="r", data_interval_start=start, data_interval_end=end
    )
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="process", map_index=-1, try_number=1)
    return {"dag_run": run, "ti": ti, "params": {"max_messages": 5}}


def test_only_a_backfill_has_an_interval_to_read() -> None:
    made: Any = context("backfill")
    assert backfilled(made) == HOUR
    assert task_of(made, backfilled(made)).interval == HOUR
    assert backfilled(context("scheduled")) is None  # type: ignore[arg-type]
    assert task_of(made).interval is None


def test_a_backfill_without_an_interval_is_refused() -> None:
    for interval in ((None, None), (NOON, NOON)):
        with pytest.raises(PipelineError, match="a backfill without a data interval"):
            backfilled(context("backfill", interval))  # type: ignore[arg-type]


def test_a_log_serves_a_backfill_and_a_queue_does_not() -> None:
    made: Any = context("backfill")

    refuse_backfill(made, KafkaProducer(group_id="g", topics=["t"]))
    with pytest.raises(AirflowFailException, match="the producer 'sqlite' reads a live queue"):
        refuse_backfill(made, SqliteProducer(queue="q"))


def test_a_backfill_reads_its_whole_interval_whatever_the_budgets() -> None:
    operator = BroadwayProcessorOperator(task_id="process", pipeline=Sums, max_bytes=7)
    made: Any = context("backfill")

    assert budget_of(operator, made, HOUR) == Budget(idle_seconds=1.0)
    assert budget_of(operator, made).max_messages == 5
    limited = BroadwayProcessorOperator(
        task_id="process", pipeline=Sums, execution_timeout=timedelta(seconds=100)
    )
    assert budget_of(limited, made, HOUR).max_seconds == 80.0
