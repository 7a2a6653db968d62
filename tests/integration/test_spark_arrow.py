"""Staging in a bucket that Spark's Hadoop cannot read: through fsspec and Arrow."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message
from airflow_broadway.spark import failed
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.arrow import ArrowFiles
from tests.s3_server import S3Server, s3_server
from tests.unit.spark.pipelines import Counting, Mending
from tests.unit.spark.plans import Planned, Row, Staged, rows
from tests.unit.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


class Bucket(Staged):
    """A run's folder in a bucket; its files are first written to a disk."""

    def __init__(self, server: S3Server, folder: Any) -> None:
        self.store = server.store(server.root())
        self.options = server.options()
        super().__init__(folder / "Counting" / "dag" / "run!3A1")
        self.uri = f"{self.store.spark_uri()}/Counting/dag/run!3A1"
        self.arrow = ArrowFiles(self.uri, self.options)
        self.store.root_id()

    def upload(self) -> None:
        """Copies the folder to the bucket."""
        target = f"{self.store.root}/Counting/dag/run!3A1/"
        self.store.fs.put(f"{self.root}/", target, recursive=True)

    def run(self, callback: Any, *plans: Any, pipeline: type[Counting] = Counting) -> int:
        pipeline.callback = staticmethod(callback)
        work = self.work(pipeline, *plans)
        self.upload()
        code = run_work(spark_session(), self.uri, self.arrow, work, arrow=self.arrow)
        self.files = self.arrow  # type: ignore[assignment]
        return code


@pytest.fixture
def bucket(server, tmp_path):
    yield Bucket(server, tmp_path)
    Counting.callback = staticmethod(lambda *_: None)
    Mending.mend = staticmethod(lambda messages: messages)


def test_batches_are_read_and_outcomes_written(bucket):
    # Given batches whose messages differ, in files of three batches
    batches = [Planned(f"b{n}", rows(5, prefix=f"b{n}-")) for n in range(7)]
    plan = bucket.plan("default", batches, batches_per_file=3)
    seen: dict[str, list[str]] = {}

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        seen[info.batch_id] = sorted(row.message_id for row in messages.collect())
        if info.batch_id == "b2":
            raise ValueError("b2 is broken")
        return failed(messages.where("data.n = 0"), reason="zero")

    # When they are handled
    assert bucket.run(callback, plan) == 0

    # Then each reads its own rows, and its outcome is in the bucket
    assert seen == {f"b{n}": [f"b{n}-{i}" for i in range(5)] for n in range(7)}
    outcomes = bucket.outcomes("default")
    assert {name: (made.successful, made.failed) for name, made in outcomes.items()} == {
        f"b{n}": (0, 5) if n == 2 else (4, 1) for n in range(7)
    }
    assert bucket.entries(outcomes["b1"])["b1-0"].verdict.reason == "zero"


def test_every_schema_type_round_trips(bucket):
    schema = (
        "b boolean, t tinyint, s smallint, i int, l bigint, f float, d double, m decimal(38,10),"
        " x string not null, y binary, dt date, ts timestamp, tn timestamp_ntz, a array<int>,"
        " p map<string, double>, st struct<`odd name`: int, deep: array<struct<k: string>>>"
    )
    instant = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
    data = {
        "b": True,
        "t": -128,
        "s": 32767,
        "i": 2**31 - 1,
        "l": -(2**63),
        "f": 0.5,
        "d": 1e300,
        "m": Decimal("1234567890123456789012345678.0123456789"),
        "x": "ü\u0000✓",
        "y": b"\x00\xff",
        "dt": date(1500, 2, 28),
        "ts": instant,
        "tn": datetime(1600, 1, 1, 12),  # noqa: DTZ001 - a timestamp_ntz has none
        "a": [1, None, 3],
        "p": {"k": 1.5, "n": None},
        "st": {"odd name": 1, "deep": [{"k": "v"}]},
    }
    seen: list[Any] = []

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        seen.append(messages.select("data.*").collect()[0].asDict(recursive=True))
        return failed(messages)

    def mend(messages: list[Message]) -> list[Message]:
        seen.append(messages[0].data)
        return messages

    Mending.mend = staticmethod(mend)
    row = Row("m0", data, payload=b"body", properties="{}")
    plan = bucket.plan("default", [Planned("b0", [row])], schema=schema)
    assert bucket.run(callback, plan, pipeline=Mending) == 0
    assert bucket.entries(bucket.outcome("default", "b0"))["m0"].payload == b"body"
    read, rebuilt = seen
    assert read["ts"].astimezone(UTC) == instant
    assert {**read, "ts": instant, "y": bytes(read["y"])} == data
    assert rebuilt == data
