"""Lineage: the datasets and counts that operators record for OpenLineage."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message
from airflow_broadway.adapters import lineage
from airflow_broadway.core.model.connections import NoConnections
from airflow_broadway.core.model.run_source import ARCHIVE, RunSource
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.producers import SqliteProducer
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.sinks import DeltaTable, ParquetFolder

QUEUE = ("file", "/data/q.db/orders")
FOLDER, TABLE = ("file", "/table"), ("s3://lake", "table")


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path="/data/q.db")
    batchers = {
        "python": Batcher(engine="python", sink=ParquetFolder(path="/table")),
        "spark": Batcher(schema="n long", sink=DeltaTable(path="s3://lake/table")),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, info: Any, context: Any) -> Any:
        return messages


class OnlyPython(Orders):
    batchers = {"python": Orders.batchers["python"]}


SPARK: Any = BroadwaySparkSubmitOperator


@pytest.fixture
def on(monkeypatch):
    """OpenLineage is on, in a task that Airflow supervises."""
    monkeypatch.setitem(sys.modules, lineage._LISTENER, SimpleNamespace())
    monkeypatch.setattr(lineage, "is_supervised", lambda: True)


def names(datasets: Any) -> list[tuple[str, str]]:
    return [(dataset.namespace, dataset.name) for dataset in datasets]


@pytest.mark.parametrize(
    ("operator", "outputs"),
    [
        (BroadwayProcessorOperator(task_id="t", pipeline=Orders), []),
        (
            BroadwayBatcherOperator(task_id="t", pipeline=Orders, batcher="python", processed=[]),
            [FOLDER],
        ),
        (BroadwayBatcherOperator(task_id="t", pipeline=Orders, batcher="spark", processed=[]), []),
        (SPARK(task_id="t", pipeline=Orders, batches=[]), [TABLE]),
        (BroadwayRunOperator(task_id="t", pipeline=OnlyPython), [FOLDER]),
        (BroadwayAckSensor(task_id="t", pipeline=Orders, watch=["p"]), [FOLDER, TABLE]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_task_declares_its_queue_and_the_tables_that_it_writes(operator, outputs, on):
    started = operator.get_openlineage_facets_on_start()

    assert names(started.inputs) == [QUEUE]
    assert names(started.outputs) == outputs
    assert operator.get_openlineage_facets_on_failure(None) == started


def test_fork_that_cannot_reach_airflow_resolves_nothing(on, monkeypatch):
    monkeypatch.setattr(lineage, "is_supervised", lambda: False)
    operator = BroadwayProcessorOperator(task_id="t", pipeline=Orders)

    assert operator.get_openlineage_facets_on_start().inputs == []


def noted(operator: Any, pipeline: Any, **source: Any) -> Any:
    counts = {"received": 3, "summary": "text", "batchers": {"python": {"failed": 1}}}
    lineage.report_execution(
        operator, pipeline, NoConnections(), counts, lambda: RunSource(**source)
    )
    return operator.get_openlineage_facets_on_complete(None)


def test_completed_task_reports_its_counts(on):
    completed = noted(BroadwayProcessorOperator(task_id="t", pipeline=Orders), Orders())

    assert completed.inputs[0].inputFacets["inputStatistics"].rowCount == 3
    assert completed.run_facets["broadway"].counts == {
        "received": 3,
        "batchers": {"python": {"failed": 1}},
    }


def test_messages_of_an_archive_are_not_of_the_queue(on):
    completed = noted(
        BroadwayProcessorOperator(task_id="t", pipeline=Orders), Orders(), kind=ARCHIVE
    )

    assert completed.inputs == []


def test_unknown_connection_fails_no_task(on, caplog):
    class Elsewhere(Orders):
        producer = SqliteProducer(queue="orders", conn_id="missing")

    operator = BroadwayProcessorOperator(task_id="t", pipeline=Orders)
    noted(operator, Elsewhere())

    assert "_lineage" not in operator.__dict__
    assert "not reported: ConnectionMissing" in caplog.text


def test_nothing_is_resolved_without_openlineage(monkeypatch):
    monkeypatch.delitem(sys.modules, lineage._LISTENER, raising=False)
    operator = BroadwayProcessorOperator(task_id="t", pipeline=Orders)

    noted(operator, Orders())

    assert "_lineage" not in operator.__dict__
