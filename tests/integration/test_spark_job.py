"""Batches in a real Spark: arguments and results of callbacks, and recorded outcomes."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from airflow_broadway import Batcher
from airflow_broadway.core import telemetry
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.ownership import OwnershipLost
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from airflow_broadway.core.model.message import Message
from airflow_broadway.sinks import ParquetFolder
from airflow_broadway.spark import entries as spark_entries
from airflow_broadway.spark import failed, unsuccessful
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.session import ClassicSessions, open_session
from tests.unit.spark.pipelines import Counting, Mending, Without
from tests.unit.spark.plans import (
    EPOCH,
    EVERY_TYPE,
    VALUES,
    Planned,
    Row,
    Staged,
    plan_path,
    rows,
)
from tests.unit.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

Callback = Callable[["DataFrame", BatchInfo], Any]


class Job(Staged):
    """A run's folder, and the application that handles its batches."""

    @property
    def spark(self) -> SparkSession:
        session: SparkSession = spark_session()
        return session

    def run(
        self,
        callback: Callback,
        *plans: Any,
        pipeline: type[Counting] = Counting,
        try_number: int = 1,
        **more: Any,
    ) -> int:
        """Handles the batches of plans by ``callback``; returns the exit code."""
        pipeline.callback = staticmethod(callback)
        return self.run_work(self.work(pipeline, *plans, try_number=try_number), **more)

    def run_work(self, work: Work, **more: Any) -> int:
        return run_work(ClassicSessions(self.spark), self.uri, self.files, work, **more)

    def run_batch(self, callback: Callback, count: int = 10, **more: Any) -> Any:
        """Runs one batch of ``count`` messages; returns its outcome and its entries."""
        row = more.pop("rows", {})
        key = row.get("batch_key", "default")
        plan = self.plan("default", [Planned("b0", rows(count, **row), batch_key=key)])
        assert self.run(callback, plan, **more) == 0
        outcome = self.outcome("default", "b0")
        return outcome, self.entries(outcome)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.fixture(autouse=True)
def _clean():
    Counting.calls.clear()
    Mending.seen.clear()
    Mending.mend = staticmethod(lambda messages: messages)
    yield
    Counting.callback = staticmethod(lambda *_: None)


def pairs(count: int) -> list[Planned]:
    """Returns batches of two messages each: b0, b1 and so on."""
    return [Planned(f"b{n}", rows(2, prefix=f"b{n}-")) for n in range(count)]


#: The original body and properties of a message.
BODY = {"payload": b"body", "properties": "{}"}


def sleep(messages: DataFrame) -> None:
    """Runs a job of a minute, which ends immediately when it is cancelled."""
    messages.sparkSession.range(2).selectExpr(
        "java_method('java.lang.Thread', 'sleep', 60000L)"
    ).collect()


def test_a_batch_with_a_raising_splitter_fails_before_its_callback(job):
    three = [Row(f"m{n}", {"n": n}, payload=b"body", properties="{}") for n in range(3)]
    refused, handled = Planned("b0", three[:2], error="ValueError: 35"), Planned("b1", three[2:])
    plan = job.plan("default", [refused, handled])
    seen: list[str] = []
    assert job.run(lambda messages, info: seen.append(info.batch_id), plan) == 0
    assert seen == ["b1"]
    outcome = job.outcome("default", "b0")
    assert (outcome.successful, outcome.failed, outcome.error) == (0, 2, "ValueError: 35")
    entries = job.entries(outcome).values()
    assert {entry.verdict.reason for entry in entries} == {"ValueError: 35"}


# -- arguments of a callback -----------------------------------------------------------------------


def test_a_frame_has_the_documented_columns_and_types(job):
    received: list[Any] = []

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        collected = messages.orderBy("position").collect()
        received.append((messages.schema.simpleString(), collected, info))

    rows = Row(
        "m0",
        {"n": 7},
        batch_key="k",
        metadata={"topic": "t"},
        attempt=3,
        redelivered=True,
        received_at=EPOCH,
    )
    plan = job.plan("default", [Planned("b0", [rows, Row("m1", {"n": None})], batch_key="k")])
    assert job.run(callback, plan) == 0
    schema, (first, second), info = received[0]
    assert schema == (
        "struct<message_id:string,data:struct<n:bigint>,batch_key:string,metadata:map<string,string>,"
        "attempt:int,redelivered:boolean,received_at:timestamp,position:bigint>"
    )
    assert first.asDict(recursive=True) | {"received_at": None} == {
        "message_id": "m0",
        "data": {"n": 7},
        "batch_key": "k",
        "metadata": {"topic": "t"},
        "attempt": 3,
        "redelivered": True,
        "received_at": None,
        "position": 0,
    }
    assert first.received_at.astimezone(UTC) == EPOCH
    assert second.data.n is None
    assert info == BatchInfo("default", "k", None, 2, Trigger.SIZE, "b0", 1, 1)


def test_every_schema_type_round_trips(job):
    seen: list[Any] = []

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        data_type = dict(messages.dtypes)["data"]
        seen.append((data_type, messages.select("data.*").collect()[0].asDict(recursive=True)))
        return failed(messages)

    def mend(messages: list[Message]) -> list[Message]:
        seen.append(messages[0].data)
        return messages

    Mending.mend = staticmethod(mend)
    plan = job.plan("default", [Planned("b0", [Row("m0", VALUES)])], schema=EVERY_TYPE)
    assert job.run(callback, plan, pipeline=Mending) == 0
    (kinds, row), rebuilt = seen
    assert kinds == (
        "struct<b:boolean,t:tinyint,s:smallint,i:int,l:bigint,f:float,d:double,m:decimal(38,10),"
        "x:string,y:binary,dt:date,ts:timestamp,tn:timestamp_ntz,a:array<int>,"
        "p:map<string,double>,st:struct<odd name:int,deep:array<struct<k:string>>>>"
    )
    assert row["ts"].astimezone(UTC) == VALUES["ts"]
    assert {**row, "ts": VALUES["ts"], "y": bytes(row["y"])} == VALUES
    # handle_failed gets plain Python, with aware timestamps.
    assert rebuilt == VALUES
    assert rebuilt["ts"].tzinfo is UTC
    assert type(rebuilt["y"]) is bytes


@pytest.mark.parametrize(
    ("as_bytes", "data", "kind", "python"),
    [
        (True, b"\x00\xff", "binary", b"\x00\xff"),
        (False, '{"a": [1, null]}', "string", {"a": [1, None]}),
        (True, None, "binary", None),
        (False, None, "string", None),
    ],
)
def test_data_without_schema_is_json_text(job, as_bytes, data, kind, python):
    seen: list[Any] = []

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        seen.append((dict(messages.dtypes)["data"], messages.first().data))  # type: ignore[union-attr]
        return failed(messages)

    def mend(messages: list[Message]) -> list[Message]:
        seen.append(messages[0].data)
        return messages

    Mending.mend = staticmethod(mend)
    plan = job.plan("default", [Planned("b0", [Row("m0", data)])], schema=None, as_bytes=as_bytes)
    assert job.run(callback, plan, pipeline=Mending) == 0
    assert seen == [(kind, data), python]


def test_a_batch_reads_only_its_own_rows(job):
    seen: dict[str, list[str]] = {}

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        seen[info.batch_id] = sorted(row.message_id for row in messages.collect())

    batches = [Planned(f"b{n}", rows(5, prefix=f"b{n}-")) for n in range(7)]
    plan = job.plan("default", batches, batches_per_file=3)
    assert job.run(callback, plan) == 0
    assert seen == {f"b{n}": [f"b{n}-{i}" for i in range(5)] for n in range(7)}


def test_a_batch_reads_only_its_own_row_groups(job):
    # Given a file whose second batch is damaged, and another that is no Parquet
    batches = [Planned(f"b{n}", rows(100, prefix=f"b{n}-")) for n in range(6)]
    plan = job.plan("default", batches, batches_per_file=3)
    partly_damaged, no_parquet = (job.root / plan.path / name for name in plan.data)
    no_parquet.write_bytes(b"PAR1 and no more")
    groups = pq.read_metadata(partly_damaged)
    starts = [groups.row_group(n).column(0).dictionary_page_offset or 0 for n in range(3)]
    assert all(starts)
    with partly_damaged.open("r+b") as file:
        file.seek(starts[1])
        file.write(b"\xff" * (starts[2] - starts[1]))
    seen: list[int] = []

    # When the first is read whole, and the others are not read
    def callback(messages: DataFrame, info: BatchInfo) -> None:
        if info.batch_id == "b0":
            seen.append(len(messages.collect()))

    assert job.run(callback, plan) == 0

    # Then no batch fails from the damage
    assert seen == [100]
    assert {outcome.error for outcome in job.outcomes("default").values()} == {""}


def test_a_merged_batch_reads_several_ranges(job):
    from dataclasses import replace

    from airflow_broadway.core.formats.plan import BatchPlan

    seen: list[Any] = []

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        seen.append((info.batch_key, sorted(row.message_id for row in messages.collect())))

    batches = [Planned(f"b{n}", rows(2, prefix=f"b{n}-"), batch_key=n) for n in range(6)]
    plan = job.plan("merged", batches, batches_per_file=2)
    head, planned = BatchPlan.read(job.files, plan.path)
    first, *_ = planned
    merged = replace(
        first, rows=[[0, 1], [5, 5]], files=[0, 2], batch_key=None, keys=3, size=6, batch_id="all"
    )
    head = replace(head, batches=1)
    (job.root / plan.path / "plan.jsonl").write_text(f"{head.dumps()}\n{merged.dumps()}\n")
    assert job.run(callback, head) == 0
    assert seen == [(None, ["b0-0", "b0-1", "b1-0", "b1-1", "b5-0", "b5-1"])]


def test_a_batch_key_round_trips(job):
    key = ["a", [1, None]]  # JSON's text of ("a", (1, None))
    plan = job.plan("default", [Planned("b0", rows(1, batch_key=key), batch_key=key)])
    assert job.run(lambda messages, info: None, plan) == 0
    assert Counting.calls[0][1].batch_key == ("a", (1, None))


def test_driver_only_callbacks_start_no_job(job):
    tracker = job.spark.sparkContext.statusTracker()
    plan = job.plan(
        "default", [Planned(f"quiet{n}", rows(10)) for n in range(40)], batches_per_file=1
    )
    assert job.run(lambda messages, info: None, plan) == 0
    for n in range(40):
        assert list(tracker.getJobIdsForGroup(f"quiet{n}")) == []
    assert len(job.outcomes("default")) == 40


def test_jobs_are_named_after_their_batch(job):
    tracker = job.spark.sparkContext.statusTracker()
    plan = job.plan("default", [Planned("loud", rows(10))])
    assert job.run(lambda messages, info: messages.count() and None, plan) == 0
    assert len(tracker.getJobIdsForGroup("loud")) >= 1


def test_a_path_with_odd_characters_is_read(tmp_path):
    job = Job(tmp_path / "we[i]r*d {a,b} !3A%3A ü")
    seen: list[int] = []
    plan = job.plan("default", [Planned("b0", rows(3))])
    assert job.run(lambda m, info: seen.append(m.count()), plan) == 0
    assert seen == [3]


def test_temporary_views_belong_to_one_batch(job):
    seen: dict[str, set[str]] = {}
    barrier = threading.Barrier(3, timeout=60)

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        messages.createOrReplaceTempView("mine")
        messages.sparkSession.conf.set("spark.sql.shuffle.partitions", info.size)
        barrier.wait()
        session = messages.sparkSession
        seen[info.batch_id] = {row.message_id for row in session.table("mine").collect()}
        assert session.conf.get("spark.sql.shuffle.partitions") == str(info.size)

    batches = [Planned(f"b{n}", rows(n + 1, prefix=f"b{n}-"), batch_key=n) for n in range(3)]
    assert job.run(callback, job.plan("wide", batches)) == 0
    assert seen == {f"b{n}": {f"b{n}-{i}" for i in range(n + 1)} for n in range(3)}
    assert all(not outcome.error for outcome in job.outcomes("wide").values())


def test_concurrent_batches_write_to_separate_paths(job, tmp_path):
    lake = f"file://{tmp_path}/lake"
    barrier = threading.Barrier(3, timeout=60)

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        barrier.wait()
        rows = messages.select("message_id", "data.*").repartition(2)
        rows.write.mode("overwrite").parquet(info.path(lake, "dt=2026-01-01"))

    batches = [Planned(f"b{n}", rows(20, prefix=f"b{n}-"), batch_key=n) for n in range(3)]
    assert job.run(callback, job.plan("wide", batches)) == 0
    frame = job.spark.read.parquet(lake)
    assert frame.count() == frame.select("message_id").distinct().count() == 60
    assert {row.batch_id for row in frame.select("batch_id").distinct().collect()} == {
        "b0",
        "b1",
        "b2",
    }


def test_a_batch_key_in_a_path_round_trips_below_the_root(job, tmp_path):
    keys = ["../../finance/payroll", "a/b=c:d %", "..", "", "Zürich ✓"]

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        rows = messages.select("message_id")
        rows.write.mode("overwrite").parquet(info.path(f"file://{lake}", f"key={info.batch_key}"))

    lake = tmp_path / "deep" / "lake"
    batches = [Planned(f"b{n}", rows(1, prefix=f"b{n}-"), batch_key=k) for n, k in enumerate(keys)]
    assert job.run(callback, job.plan("wide", batches)) == 0
    assert all(not outcome.error for outcome in job.outcomes("wide").values())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["lake"]
    frame = job.spark.read.parquet(f"file://{lake}").select("key", "batch_id").collect()
    expected = {(key or None, f"b{n}") for n, key in enumerate(keys)}
    assert {(row.key, row.batch_id) for row in frame} == expected


def test_settings_have_defaults_and_overrides(job):
    seen: list[Any] = []

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        conf = messages.sparkSession.conf
        seen.append(
            (conf.get("spark.sql.session.timeZone"), conf.get("spark.sql.shuffle.partitions"))
        )

    job.run_batch(callback)
    assert seen == [("UTC", "4")]  # the second by the session's own configuration


def test_an_existing_setting_is_kept(monkeypatch):
    # Given a driver whose spark-submit sets one of our settings, and one of its own
    settings = {"spark.sql.session.timeZone": "Asia/Tokyo", "a.b": "c"}
    from pyspark import SparkConf

    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    monkeypatch.setattr("pyspark.SparkConf", lambda: conf)
    builder = mock.Mock()
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", builder)

    open_session()

    # Then the missing ones are added
    builder.config.assert_called_once_with(conf=conf)
    assert dict(conf.getAll()) == settings | {
        "spark.scheduler.mode": "FAIR",
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.parquet.filterPushdown": "true",
    }


# -- results of a callback -------------------------------------------------------------------------


def test_returning_none_is_success(job):
    outcome, entries = job.run_batch(lambda messages, info: None)
    assert (outcome.successful, outcome.failed, outcome.missing) == (10, 0, 0)
    assert outcome.exceptions is None
    assert (outcome.error, outcome.try_number, entries) == ("", 1, {})
    assert outcome.application_id == job.spark.sparkContext.applicationId
    assert outcome.seconds > 0
    assert datetime.fromisoformat(outcome.started_at).tzinfo is not None


def _by_column(messages: DataFrame) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    return failed(messages.where("data.n >= 8"), reason=F.concat(F.lit("bi"), F.lit("g")))


FAILED = {
    "frame": lambda m: failed(m.where("data.n >= 8"), reason="big"),
    "ids": lambda m: failed((f"m{n}" for n in (8, 9)), reason="big"),
    "column": _by_column,
    "list": lambda m: [failed(["m8"], reason="big"), failed(m.where("data.n = 9"), reason="big")],
    "or": lambda m: failed(["m8", "m9"], reason="no") | failed(["m9", "m8", "m9"], reason="big"),
    "duplicates": lambda m: failed(m.where("data.n >= 8").union(m.where("data.n > 7")), "big"),
    "outcomes": lambda m: m.selectExpr("message_id", "data.n < 8 AS ok", "'big' AS reason"),
    "status": lambda m: m.selectExpr(
        "message_id", "IF(data.n < 8, 'OK', 'Failed') AS status", "'big' AS reason"
    ),
}


@pytest.mark.parametrize("small", [1000, 1], ids=["looked up", "joined"])
@pytest.mark.parametrize("callback", FAILED.values(), ids=FAILED)
def test_every_form_of_failures_fails_its_messages(job, monkeypatch, callback, small):
    monkeypatch.setattr(unsuccessful, "SMALL", small)
    outcome, entries = job.run_batch(lambda messages, info: callback(messages))
    assert outcome.error == ""
    assert (outcome.successful, outcome.failed, outcome.missing) == (8, 2, 0)
    assert sorted(entries) == ["m8", "m9"]
    for message_id, entry in entries.items():
        assert entry.receipt == message_id.replace("m", "r")
        assert entry.verdict.action is Action.RETRY
        assert 54 <= entry.verdict.delay <= 66
        assert (entry.verdict.reason, entry.verdict.stage) == ("big", "batch")


@pytest.mark.parametrize("small", [1000, 1], ids=["looked up", "joined"])
def test_a_message_left_out_of_the_outcomes_is_released(job, monkeypatch, small):
    monkeypatch.setattr(unsuccessful, "SMALL", small)
    outcome, entries = job.run_batch(
        lambda messages, info: messages.where("data.n > 1").selectExpr(
            "message_id", "data.n > 2 AS status"
        ),
        rows={"attempt": 2, **BODY},
    )
    assert (outcome.successful, outcome.failed, outcome.missing, outcome.error) == (7, 1, 2, "")
    assert {name: entry.verdict.action for name, entry in entries.items()} == {
        "m0": Action.RELEASE,
        "m1": Action.RELEASE,
        "m2": Action.RETRY,
    }
    # Some brokers release by republishing, which needs the body.
    first = entries["m0"]
    assert (first.receipt, first.attempt) == ("r0", 2)
    assert (first.payload, first.properties) == (b"body", "{}")


@pytest.mark.parametrize(
    "callback", [lambda m: failed(m.where("false")), lambda m: failed([]), lambda m: []]
)
def test_empty_failures_are_success(job, callback):
    outcome, _ = job.run_batch(lambda messages, info: callback(messages))
    assert (outcome.successful, outcome.failed, outcome.exceptions) == (10, 0, None)


def _raises(messages: DataFrame) -> Any:
    raise ValueError("no such luck")


def _exits(messages: DataFrame) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize("small", [1000, 1], ids=["looked up", "joined"])
@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (_raises, "ValueError: no such luck"),
        (_exits, "SystemExit: 3"),
        (lambda m: m.select("nothing"), "UNRESOLVED_COLUMN"),
        (lambda m: failed(m.selectExpr("raise_error('lazily') AS message_id")), "lazily"),
        (
            lambda m: failed(["m1", "stranger"]),
            "PipelineError: handle_batch returned message ids that are not of this batch",
        ),
        (
            lambda m: failed(m.selectExpr("concat('x', message_id) AS message_id")),
            "message ids that are not of this batch: 'xm",
        ),
        (
            lambda m: m.selectExpr("message_id", "'perhaps' AS status"),
            "has the status 'perhaps'; expected one of",
        ),
        (lambda m: m.select("message_id", "data"), "with neither of the columns ok and status"),
        (
            lambda m: m.selectExpr("message_id", "1 AS ok"),
            "column 'ok' of the DataFrame that handle_batch returned is",
        ),
        (lambda messages: 42, "handle_batch returned int 42; on Spark it returns None"),
    ],
)
def test_an_error_fails_the_whole_batch(job, monkeypatch, callback, text, small):
    monkeypatch.setattr(unsuccessful, "SMALL", small)
    plan = job.plan("default", [Planned("b0", rows(5)), Planned("b1", rows(5, prefix="n"))])

    def first_only(messages: DataFrame, info: BatchInfo) -> Any:
        return callback(messages) if info.batch_id == "b0" else None

    # The application did its work, so it exits with 0; the other batch is handled.
    assert job.run(first_only, plan) == 0
    outcome = job.outcome("default", "b0")
    assert text in outcome.error
    assert (outcome.successful, outcome.failed) == (0, 5)
    entries = job.entries(outcome)
    assert sorted(entries) == [f"m{n}" for n in range(5)]
    assert all(text in entry.verdict.reason for entry in entries.values())
    assert job.outcome("default", "b1").successful == 5


def test_a_pipeline_without_handle_batch_fails_its_batch(job):
    plan = job.plan("default", [Planned("b0", rows(2))])
    work = job.work(Without, plan)
    assert job.run_work(work) == 0
    assert "Without defines no handle_batch" in job.outcome("default", "b0").error


def test_an_empty_batch_has_an_outcome(job):
    outcome, _ = job.run_batch(lambda messages, info: failed(messages), count=0)
    assert (outcome.successful, outcome.failed, outcome.exceptions) == (0, 0, None)


@pytest.mark.parametrize("by", ["ids", "rows", "column"])
@pytest.mark.parametrize("letter", ["x", "ü"])
def test_reasons_are_cut_at_2048_bytes(job, letter, by):
    from pyspark.sql import functions as F  # noqa: N812

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        reason: Any = F.lit(letter * 5000) if by == "column" else letter * 5000
        return failed(["m0"] if by == "ids" else messages.where("data.n = 0"), reason=reason)

    _, entries = job.run_batch(callback)
    assert 2046 <= len(entries["m0"].verdict.reason.encode()) <= 2048


def test_entries_keep_attempt_payload_and_own_action(job):
    rows = [
        Row("last", {"n": 0}, attempt=5, payload=b"body", properties='{"a":1}'),
        Row("own", {"n": 1}, on_failure="ack", payload=b"", properties="{}"),
        Row("first", {"n": 2}, payload=b"\xff", properties=None),
        Row("acked", {"n": 3}, acked=True),
        Row("gone", {"n": 4}, acked=True),
    ]
    plan = job.plan("default", [Planned("b0", rows)])

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        present = messages.where("message_id != 'gone'")
        return present.selectExpr("message_id", "false AS ok", "'no' AS reason")

    assert job.run(callback, plan, pipeline=Mending) == 0
    outcome = job.outcome("default", "b0")
    entries = job.entries(outcome)
    assert {name: entry.verdict.action for name, entry in entries.items()} == {
        "last": Action.DEAD_LETTER,
        "own": Action.ACK,
        "first": Action.RETRY,
    }
    assert (entries["last"].attempt, entries["last"].payload) == (5, b"body")
    assert entries["last"].properties == '{"a":1}'
    assert entries["first"].payload == b"\xff"
    # Settled before: reported to handle_failed as failed, and not settled again.
    assert (outcome.failed, outcome.missing) == (4, 0)
    [failed_messages] = Mending.seen
    message_ids = sorted(message.message_id for message in failed_messages)
    assert message_ids == ["acked", "first", "last", "own"]


@pytest.mark.parametrize("small", [1000, 1], ids=["looked up", "joined"])
@pytest.mark.parametrize("pipeline", [Counting, Mending])
def test_entries_name_their_generation(job, monkeypatch, pipeline, small):
    # One message was delivered to both: each generation settles its own delivery.
    monkeypatch.setattr(unsuccessful, "SMALL", small)
    generations = ("0" * 31 + "a", "0" * 31 + "b")
    for generation in generations:
        job.lease(generation=generation)
    rows = [
        Row("both", {"n": 0}, receipt="first", source=0),
        Row("both", {"n": 0}, receipt="second", source=1, redelivered=True),
        Row("one", {"n": 1}, receipt="third", source=1),
        Row("fine", {"n": 2}, receipt="fourth", source=0),
    ]
    plan = job.plan("default", [Planned("b0", rows, generations=generations)])
    callback = lambda messages, info: failed(messages.where("data.n < 2"))  # noqa: E731
    assert job.run(callback, plan, pipeline=pipeline) == 0
    outcome = job.outcome("default", "b0")
    assert (outcome.successful, outcome.failed, outcome.missing) == (1, 3, 0)
    assert [
        (line.entry.message_id, line.entry.receipt, line.source) for line in job.lines(outcome)
    ] == [("both", "first", 0), ("both", "second", 1), ("one", "third", 1)]


def test_a_large_failure_is_streamed(job):
    outcome, entries = job.run_batch(
        lambda m, info: failed(m.where("data.n % 2 = 0"), reason="even"), 20_000
    )
    assert (outcome.successful, outcome.failed) == (10_000, 10_000)
    assert len(entries) == 10_000


def test_the_guides_callback_fails_implausible_rows(job, tmp_path, monkeypatch):
    # Given the first sample of the guide, which writes into a local folder
    guide = (Path(__file__).parents[2] / "docs" / "spark.md").read_text("utf-8")
    sample = guide.partition("```python\n")[2].partition("```")[0]
    module = ModuleType("guide_of_spark")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(sample.replace("s3a://lake", f"file://{tmp_path}/lake"), module.__dict__)
    pipeline = module.Flights(producer={"path": f"{tmp_path}/queue.db"})
    data = [{"origin": "EWR", "dest": "LAX", "dep_delay": late} for late in (5.0, 1000.0, 1000.1)]
    rows = [Row(f"m{n}", item) for n, item in enumerate(data)]
    schema = pipeline.batchers["default"].schema
    plan = job.plan("default", [Planned("b0", rows)], schema=schema)

    # When a batch of it is handled
    handle = lambda messages, info: pipeline.handle_batch("default", messages, info, None)  # noqa: E731
    assert job.run(handle, plan) == 0

    # Then one has failed, with its reason, and the others are in the lake
    outcome = job.outcome("default", "b0")
    assert (outcome.successful, outcome.failed, outcome.error) == (2, 1, "")
    assert {name: entry.verdict.reason for name, entry in job.entries(outcome).items()} == {
        "m2": "implausible delay"
    }
    frame = job.spark.read.parquet(f"file://{tmp_path}/lake/flights").collect()
    assert sorted((row.message_id, row.dest, row.dep_delay) for row in frame) == [
        ("m0", "LAX", 5.0),
        ("m1", "LAX", 1000.0),
    ]


# -- handle_failed ---------------------------------------------------------------------------------


def test_handle_failed_may_change_verdicts(job):
    def mend(messages: list[Message]) -> list[Message]:
        assert [m.batcher for m in messages] == ["default"] * len(messages)
        return [
            m.configure_ack(on_failure="ack") if m.data["n"] % 2 else m.failed("mended")
            for m in messages
        ]

    Mending.mend = staticmethod(mend)
    kwargs: dict[str, Any] = {"rows": {"metadata": {"k": "v"}, "batch_key": ["a", 1]}}
    outcome, entries = job.run_batch(
        lambda m, info: failed(m.where("data.n < 4")), pipeline=Mending, **kwargs
    )
    assert outcome.failed == 4
    assert {n: (e.verdict.action, e.verdict.reason) for n, e in entries.items()} == {
        "m0": (Action.RETRY, "mended"),
        "m1": (Action.ACK, ""),
        "m2": (Action.RETRY, "mended"),
        "m3": (Action.ACK, ""),
    }
    message = next(m for m in Mending.seen[0] if m.message_id == "m0")
    assert (message.metadata, message.batch_key) == ({"k": "v"}, ("a", 1))
    assert message.received_at == EPOCH
    assert message.status.text == "failed by handle_batch"


def test_handle_failed_gets_the_key_of_the_batch(job):
    keys = ["default", "7", 7, ["a", [1]], None]
    batches = [
        Planned(f"b{n}", rows(1, prefix=f"b{n}-", batch_key=key), batch_key=key)
        for n, key in enumerate(keys)
    ]
    # A batch of several keys has none itself
    several = [Row(str(key), {"n": 1}, batch_key=key) for key in ("EWR", ["a", 1])]
    batches.append(Planned("merged", several, batch_key=None, keys=2))
    plan = job.plan("default", batches)
    callback = lambda messages, info: failed(messages)  # noqa: E731
    assert job.run(callback, plan, pipeline=Mending) == 0
    assert {m.message_id: m.batch_key for call in Mending.seen for m in call} == {
        "b0-0": "default",
        "b1-0": "7",
        "b2-0": 7,
        "b3-0": ("a", (1,)),
        "b4-0": None,
        "EWR": "EWR",
        "['a', 1]": '["a", 1]',
    }


def test_handle_failed_gets_at_most_a_thousand_messages(job):
    outcome, _ = job.run_batch(_raise_later, 2_500, pipeline=Mending)
    assert outcome.failed == 2_500
    assert sorted(len(chunk) for chunk in Mending.seen) == [500, 1000, 1000]
    assert Mending.seen[0][0].status.text == "ValueError: later"


def _raise_later(messages: DataFrame, info: BatchInfo) -> Any:
    raise ValueError("later")


def test_messages_missing_from_handle_failed_are_released(job):
    Mending.mend = staticmethod(lambda messages: messages[1:])
    some = lambda m, info: failed(["m0", "m1"])  # noqa: E731
    outcome, entries = job.run_batch(some, pipeline=Mending, rows=BODY)
    assert (outcome.successful, outcome.failed, outcome.missing) == (8, 1, 1)
    assert sorted(e.verdict.action for e in entries.values()) == [Action.RELEASE, Action.RETRY]
    assert {(e.payload, e.properties) for e in entries.values()} == {(b"body", "{}")}


def test_the_driver_settles_nothing_immediately(job, caplog):
    Mending.mend = staticmethod(lambda messages: [m.ack_immediately() for m in messages])
    outcome, entries = job.run_batch(lambda m, info: failed(["m0"], reason="r"), pipeline=Mending)
    assert outcome.failed == 1
    assert entries["m0"].verdict.action is Action.RETRY
    assert "ack_immediately is not possible in a Spark batch" in caplog.text


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York", "Europe/Berlin"])
def test_handle_failed_gets_timestamps_in_any_time_zone(job, monkeypatch, zone):
    # Given timestamps that datetime.fromtimestamp cannot build, or builds twice, in some zone
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    timestamps = [
        datetime(1, 1, 1, tzinfo=UTC),  # the zero of Go and of .NET
        datetime(1, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
        datetime(1883, 11, 18, 12, 3, 57, 999999, tzinfo=UTC),
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    ]
    schema = (
        "t timestamp, `a.b c` struct<t: timestamp, n: int>, l array<struct<t: timestamp>>,"
        " m map<timestamp, array<timestamp>>, v map<string, timestamp>, gone struct<t: timestamp>"
    )
    data = [
        {
            "t": timestamp,
            "a.b c": {"t": timestamp, "n": 1},
            "l": [{"t": timestamp}, None, {"t": None}],
            "m": {timestamp: [timestamp, None], EPOCH: None},
            "v": {"k": timestamp, "n": None},
            "gone": None,
        }
        for timestamp in timestamps
    ]
    rows = [Row(f"m{n}", item, received_at=timestamps[n]) for n, item in enumerate(data)]
    staged_rows = [
        Row(
            row.message_id,
            {**row.data, "m": list(row.data["m"].items())},
            received_at=row.received_at,
        )
        for row in rows
    ]
    batches = [Planned("b0", staged_rows), Planned("b1", [Row("n0", None)])]
    plan = job.plan("default", batches, schema=schema)

    # When they fail
    try:
        assert job.run(lambda m, info: failed(m), plan, pipeline=Mending) == 0
    finally:
        monkeypatch.undo()
        time.tzset()

    # Then handle_failed gets the original values, and every batch has its outcome
    seen = {message.message_id: message for chunk in Mending.seen for message in chunk}
    assert {name: message.data for name, message in seen.items()} == {
        **{row.message_id: row.data for row in rows},
        "n0": None,
    }
    assert [seen[row.message_id].received_at for row in rows] == timestamps
    assert sorted(job.outcomes("default")) == ["b0", "b1"]


def test_a_batch_with_unreadable_data_fails_without_handle_failed(job, monkeypatch, caplog):
    def to_python(value: Any, kind: Any) -> Any:
        if value[0] == 3:
            raise ValueError("year 0 is out of range")
        return {"n": value[0]}

    monkeypatch.setattr(spark_entries, "to_python", to_python)
    batches = [Planned(f"b{n}", rows(2, lambda i, n=n: {"n": n + i})) for n in (0, 2, 4)]
    plan = job.plan("default", batches)
    callback = lambda messages, info: failed(messages, reason="bad")  # noqa: E731
    assert job.run(callback, plan, pipeline=Mending) == 0
    outcomes = job.outcomes("default")
    assert {name: (outcome.failed, outcome.error) for name, outcome in outcomes.items()} == {
        "b0": (2, ""),
        "b2": (2, "ValueError: year 0 is out of range"),
        "b4": (2, ""),
    }
    assert [len(chunk) for chunk in Mending.seen] == [2, 2]
    assert "cannot be read back (ValueError: year 0 is out of range)" in caplog.text


# -- order, resume, fence --------------------------------------------------------------------------


def test_batches_of_a_key_run_in_order_and_batchers_in_parallel(job):
    running: set[Any] = set()
    order: list[tuple[str, str]] = []
    max_running = 0
    lock = threading.Lock()

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        nonlocal max_running
        key = (info.batcher, info.batch_key)
        with lock:
            assert key not in running
            running.add(key)
            order.append((info.batcher, info.batch_id))
            max_running = max(max_running, len(running))
        time.sleep(0.05)
        with lock:
            running.remove(key)

    wide_batches = [Planned(f"w{n:02}", rows(1, prefix=f"w{n}"), batch_key=n % 2) for n in range(8)]
    other_batches = [Planned(f"o{n:02}", rows(1, prefix=f"o{n}"), batch_key=n) for n in range(8)]
    assert job.run(callback, job.plan("wide", wide_batches), job.plan("other", other_batches)) == 0
    for batcher, key in (("wide", 0), ("wide", 1)):
        own = [i for b, i in order if b == batcher and int(i[1:]) % 2 == key]
        assert own == sorted(own)
    assert 3 <= max_running <= 5  # two keys of "wide", and two lanes of "other"
    assert len(order) == 16
    assert all(not outcome.error for outcome in job.outcomes("wide").values())


def test_a_second_application_runs_only_batches_without_outcome(job):
    plan = job.plan("default", pairs(4))
    assert job.run(lambda messages, info: None, plan) == 0
    before = job.outcomes("default")
    for name in ("b1", "b3"):
        (job.root / paths.outcome(plan_path("default"), name)).unlink()
    Counting.calls.clear()
    assert job.run(lambda messages, info: None, plan, try_number=2) == 0
    assert [(info.batch_id, info.attempt) for _, info in Counting.calls] == [("b1", 2), ("b3", 2)]
    after = job.outcomes("default")
    assert {n: after[n].try_number for n in after} == {"b0": 1, "b1": 2, "b2": 1, "b3": 2}
    assert after["b0"] == before["b0"]


def test_a_zombie_cancels_its_job(job):
    plan = job.plan("default", [Planned("b0", rows(2))])

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        job.files.create(paths.of_try("handle_batches", 2), "{}")
        sleep(messages)

    started = time.monotonic()
    assert job.run(callback, plan, watch_interval=0.2) == 1
    assert time.monotonic() - started < 30
    assert job.outcomes("default") == {}


def test_a_zombie_starts_no_batch(job):
    plan = job.plan("default", [Planned("b0", rows(2))])
    job.files.create(paths.of_try("handle_batches", 2), "{}")
    with pytest.raises(OwnershipLost):
        job.run(lambda messages, info: None, plan)
    assert Counting.calls == []


def test_lapsed_messages_never_reach_the_callback(job, caplog):
    job.lease(generation="gone", seconds=-1)
    plan = job.plan(
        "default",
        [Planned("b0", rows(2), generations=("gone",)), Planned("b1", rows(2, prefix="n"))],
    )
    assert job.run(lambda messages, info: None, plan) == 1
    assert [info.batch_id for _, info in Counting.calls] == ["b1"]
    assert sorted(job.outcomes("default")) == ["b1"]
    assert "1 batch without an outcome: the lease of generation gone lapsed" in caplog.text
    assert "this run no longer holds its messages: clear `process`" in caplog.text


def test_a_stop_leaves_running_batches_without_outcome(job):
    stop = threading.Event()
    plan = job.plan("default", pairs(3))

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        if info.batch_id == "b1":
            stop.set()
            sleep(messages)

    started = time.monotonic()
    assert job.run(callback, plan, stop=stop) == 1
    assert time.monotonic() - started < 30
    assert sorted(job.outcomes("default")) == ["b0"]


class Over(BaseException):
    """No Exception: it ends the application."""


def _interrupts(job: Job, patch: pytest.MonkeyPatch) -> None:
    raise KeyboardInterrupt


def _is_over(job: Job, patch: pytest.MonkeyPatch) -> None:
    raise Over


def _is_retried(job: Job, patch: pytest.MonkeyPatch) -> None:
    """Starts the next try of the task, as after a kill during this batch."""
    job.files.create(paths.of_try("handle_batches", 2), "{}")


def _stops_spark(job: Job, patch: pytest.MonkeyPatch) -> None:
    stopped = mock.Mock()
    stopped._jsc.sc().isStopped.return_value = True
    loss = ClassicSessions(stopped).why_lost()
    patch.setattr(ClassicSessions, "why_lost", lambda *_: loss)
    raise RuntimeError("cannot call methods on a stopped SparkContext")


MISMATCH = "[PYTHON_VERSION_MISMATCH] Python in worker has …"


def _has_another_python(job: Job, patch: pytest.MonkeyPatch) -> None:
    error = RuntimeError(f"Job aborted.\npyspark…PySparkRuntimeError: {MISMATCH}\n")
    spark = mock.Mock()
    spark._jsc.sc().isStopped.return_value = False
    why_lost, sessions = ClassicSessions.why_lost, ClassicSessions(spark)
    first = spark.sparkContext.range().map().first
    for first.side_effect in (None, RuntimeError("cancelled")):
        assert why_lost(sessions, error) == ""  # a message held that text
    first.side_effect = error
    patch.setattr(ClassicSessions, "why_lost", lambda _, cause=None: why_lost(sessions, cause))
    raise error


@pytest.mark.parametrize(
    ("happens", "code", "result"),
    [
        (_interrupts, 130, ""),
        (_is_over, 1, ""),
        (_is_retried, 1, "try 2 of 'handle_batches' has begun"),
        (_stops_spark, 1, "the SparkContext was stopped"),
        (_has_another_python, 1, f"an executor cannot run Python: {MISMATCH}"),
    ],
)
def test_an_event_that_ends_the_application_fails_no_batch(
    job, monkeypatch, caplog, happens, code, result
):
    # Given three batches, and an event in the second that ends the application
    plan = job.plan("default", pairs(3))

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        if info.batch_id == "b1":
            happens(job, monkeypatch)

    assert job.run(callback, plan) == code

    # Then that one has no outcome, the first has its own, and the third was not begun
    assert sorted(job.outcomes("default")) == ["b0"]
    assert [info.batch_id for _, info in Counting.calls] == ["b0", "b1"]
    assert result in caplog.text
    # And an executor that cannot run Python is no crash of a batch, as a lost Spark is
    ended = (job.root / paths.of_try("handle_batches", 1, kind="ended")).exists()
    assert {_has_another_python: True, _stops_spark: False}.get(happens, ended) == ended


class Committing(Counting):
    """Commits its rows."""

    batchers = {"default": Batcher(schema="n bigint", sink=ParquetFolder(path="/lake"))}


def test_a_commit_during_which_spark_is_lost_is_left_to_a_later_try(job, monkeypatch, caplog):
    client = mock.Mock(commit=lambda *_: _stops_spark(job, monkeypatch))
    monkeypatch.setattr(ParquetFolder, "open_spark", lambda *_: client)
    plan = job.plan("default", pairs(1), sink="file:///lake")

    assert job.run(lambda messages, info: messages, plan, pipeline=Committing) == 1

    # Then the commit is not ruled out, and the end of the application counts as a crash
    assert "the SparkContext was stopped" in caplog.text
    client.rule_out.assert_not_called()
    assert job.outcomes("default") == {}
    assert not (job.root / paths.of_try("handle_batches", 1, kind="ended")).exists()


def test_an_unwritable_folder_is_one_clear_error(job, caplog):
    plan = job.plan("default", [Planned("b0", rows(2)), Planned("b1", rows(2, prefix="n"))])
    (job.root / "outcomes").write_text("in the way")
    assert job.run(lambda messages, info: None, plan) == 1
    assert len(Counting.calls) == 1
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1


def test_an_unknown_batcher_is_one_clear_error(job):
    plan = job.plan("nowhere", [Planned("b0", rows(2))])
    with pytest.raises(PipelineError, match="for the batcher 'nowhere', which the pipeline"):
        job.run(lambda messages, info: None, plan)


def test_a_batch_emits_telemetry(job):
    seen: list[tuple[str, str]] = []

    def handler(event: str, measurements: Any, metadata: Any) -> None:
        seen.append((event, metadata["batch_info"].batch_id))

    events = ["batch_processor.start", "batch_processor.stop", "batch_processor.exception"]
    handler_id = telemetry.attach(handler, events=events)
    try:
        plan = job.plan("default", [Planned("b0", rows(1)), Planned("b1", rows(1, prefix="n"))])

        def callback(messages: DataFrame, info: BatchInfo) -> None:
            if info.batch_id == "b1":
                raise ValueError("no")

        assert job.run(callback, plan) == 0
    finally:
        telemetry.detach(handler_id)
    assert seen == [
        ("batch_processor.start", "b0"),
        ("batch_processor.stop", "b0"),
        ("batch_processor.start", "b1"),
        ("batch_processor.stop", "b1"),
    ]


def test_ignore_corrupt_files_skips_no_message(job, caplog):
    # Given a cluster that is set to skip unreadable files, and a damaged data file
    plan = job.plan("default", pairs(2), batches_per_file=1)
    (job.root / plan.path / plan.data[0]).write_bytes(b"PAR1 and no more")

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        for name in ("Missing", "Corrupt"):
            messages.sparkSession.conf.set(f"spark.sql.files.ignore{name}Files", "true")
        messages.collect()

    assert job.run(callback, plan) == 1

    # Then the batch has no outcome, instead of a success without its messages; others are handled
    assert sorted(job.outcomes("default")) == ["b1"]
    assert "failed messages of the batch b0 cannot be read back" in caplog.text


def test_only_a_batch_with_a_missing_file_has_no_outcome(job, caplog):
    plan = job.plan("default", pairs(3), batches_per_file=1)
    (job.root / plan.path / plan.data[1]).unlink()

    assert job.run(lambda messages, info: None, plan) == 1

    assert sorted(job.outcomes("default")) == ["b0", "b2"]
    assert [info.batch_id for _, info in Counting.calls] == ["b0", "b2"]
    assert "messages of the batch b1 cannot be read back" in caplog.text
