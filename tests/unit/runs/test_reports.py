"""The last reported depth of a pipeline's queues: what is written is what the pages read."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from airflow_broadway.adapters import backlog
from airflow_broadway.adapters.backlog import look_at
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import (
    BacklogReport,
    PipelineKey,
    read_reports,
    report_backlog,
)
from airflow_broadway.runs.tasks import ProcessTask, UnstagedTask
from airflow_broadway.staging.store import Store
from tests.unit.runs.steps import PlainSums, Run
from tests.unit.runs.test_backlog import Addressed

KEY = PipelineKey("orders", "d")
DEPTH = QueueDepth(5, 1, 2, 7, 60.5)
QUEUES = WatchedQueues("orders", [SqliteProducer(queue="orders", conn_id="q")])
INFINITE, NAN = float("inf"), float("nan")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path.as_uri())


def file_of(store: Store) -> Path:
    return Path(store.root) / KEY.pipeline / KEY.dag_id / "_backlog.json"


def only_report(store: Store, key: PipelineKey = KEY) -> BacklogReport:
    report = read_reports(store, [key])[key]
    assert isinstance(report, BacklogReport)
    return report


@pytest.mark.parametrize("depth", [DEPTH, DEPTH._replace(oldest_age=None), None])
def test_report_is_read_as_written(store, depth):
    report_backlog(store, "d", QUEUES, depth, at=NOON, by="run r1")

    report = BacklogReport(at=NOON, by="run r1", depth=depth, queues=QUEUES.dumps())
    assert only_report(store) == report


def test_last_reporter_replaces_the_report(store):
    other, unreported = PipelineKey("orders", "other"), PipelineKey("unreported", "d")
    report_backlog(store, "other", QUEUES, None, at=NOON, by="task wait")
    for number, by in enumerate(("run r1", "the triggerer", "task wait")):
        at = NOON + timedelta(seconds=number)
        report_backlog(store, "d", QUEUES, DEPTH._replace(ready=number), at=at, by=by)

    assert set(read_reports(store, [KEY, other, unreported])) == {KEY, other}
    report = only_report(store)
    assert report.depth is not None
    assert (report.by, report.depth.ready) == ("task wait", 2)
    assert report.at == NOON + timedelta(seconds=2)
    assert only_report(store, other).depth is None


def test_root_without_reports_has_none(store):
    assert read_reports(store, [KEY]) == {}
    assert read_reports(store, []) == {}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda value: b"nonsense", "orders/d/_backlog.json is damaged"),
        (lambda value: b"\xff", "cannot read orders/d/_backlog.json"),
        (lambda value: b"[]", "orders/d/_backlog.json is damaged"),
        (lambda value: changed(value, at="noon"), "is damaged: Invalid isoformat"),
        (lambda value: changed(value, depth={"ready": 1}), "is damaged: 'delayed'"),
        (lambda value: changed(value, version=VERSION + 1, release="9.9"), "9.9"),
        (lambda value: b"[" * 100_000, "orders/d/_backlog.json is damaged"),
        (lambda value: changed(value, at="2026-01-31"), "has no time zone"),
        (lambda value: changed(value, depth={**value["depth"], "ready": INFINITE}), "is damaged"),
        (lambda value: changed(value, depth={**value["depth"], "dead": -1}), "is no depth"),
        (lambda value: changed(value, depth={**value["depth"], "oldest_age": NAN}), "is no depth"),
    ],
    ids=[
        *("text", "bytes", "list", "timestamp", "count", "newer"),
        *("nested", "naive", "infinite", "negative", "nan"),
    ],
)
def test_unreadable_report_affects_only_its_pipeline(store, change, error):
    other = PipelineKey("orders", "other")
    for key in (KEY, other):
        report_backlog(store, key.dag_id, QUEUES, DEPTH, at=NOON, by="run r1")
    file_of(store).write_bytes(change(json.loads(file_of(store).read_text())))

    reports = read_reports(store, [KEY, other])

    assert isinstance(reports[KEY], StagingError)
    assert error in str(reports[KEY])
    assert isinstance(reports[other], BacklogReport)
    report_backlog(store, "d", QUEUES, DEPTH, at=NOON, by="run r2")
    assert only_report(store).by == "run r2"


def changed(value: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({**value, **fields}).encode()


def test_options_with_a_secret_are_withheld(store):
    queues = WatchedQueues("orders", [Addressed(address="amqp://user:hidden@broker")])

    report_backlog(store, "d", queues, DEPTH, at=NOON, by="run r1")

    report = only_report(store)
    assert (report.depth, report.queues) == (DEPTH, "")
    assert "give it by conn_id" in report.withheld
    assert "hidden" not in file_of(store).read_text()


def test_unwritable_report_fails_nothing(store, caplog):
    file_of(store).mkdir(parents=True)

    with caplog.at_level(logging.WARNING):
        report_backlog(store, "d", QUEUES, DEPTH, at=NOON, by="run r1")

    assert "could not be reported to the pages" in caplog.text


@pytest.mark.parametrize("error", [StagingError("no client of s3"), RuntimeError("no connection")])
def test_look_succeeds_though_its_report_cannot_be_written(tmp_path, caplog, monkeypatch, error):
    # Given a triggerer that lacks the client, or the connection, of the staging root

    run = Run(tmp_path, numbers=[1, 2, 3])
    monkeypatch.setattr(backlog, "open_store", mock.Mock(side_effect=error))

    depth = look_at(
        WatchedQueues.of(run.pipeline), f"file://{tmp_path}/staging", dag_id="d", by="t"
    )

    assert depth is not None
    assert depth.ready == 3
    assert f"could not be reported to the pages: {type(error).__name__}: {error}" in caplog.text


@pytest.mark.parametrize("source", [RunSource(), RunSource(kind=DEAD_LETTERS)])
@pytest.mark.parametrize("staged", [True, False])
def test_task_reports_the_remaining_backlog(tmp_path, source, staged):
    run = Run(tmp_path, pipeline=PlainSums, numbers=[1, 2, 3])
    kind = ProcessTask if staged else UnstagedTask
    kind(
        run.staged,
        run.pipeline,
        run.task(),
        run.ports,
        budget=Budget(max_messages=2),
        source=source,
    ).run()

    report = only_report(run.staged.store, PipelineKey("Sums", "sums"))
    assert report.by == "run manual__1"
    assert report.depth is not None
    assert report.depth.ready == 1
    [loaded] = WatchedQueues.loads(report.queues, own=True).producers
    assert isinstance(loaded, SqliteProducer)
    assert (loaded.queue, loaded.path) == ("sums", str(tmp_path / "queue.db"))


def test_sensor_or_trigger_reports_the_depth(tmp_path):
    run = Run(tmp_path, numbers=[1, 2, 3])
    queues = WatchedQueues.of(run.pipeline)
    root = f"file://{tmp_path}/staging"

    assert look_at(queues, root) is not None
    assert read_reports(run.staged.store, [PipelineKey("Sums", "d")]) == {}
    depth = look_at(queues, root, dag_id="d", by="task wait")

    report = only_report(run.staged.store, PipelineKey("Sums", "d"))
    assert (report.depth, report.by) == (depth, "task wait")
    assert depth is not None
    assert depth.ready == 3
