"""Staging in a bucket that Spark's Hadoop cannot read: through fsspec and Arrow."""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest

from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message
from airflow_broadway.spark import failed, job
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.arrow import ArrowFiles
from airflow_broadway.spark.job import CLIENT_VARIABLE
from airflow_broadway.spark.session import INCOMPLETE, REFUSED, ClassicSessions
from scripts.airflow_env import ROOT
from tests.s3_server import S3Server, s3_server
from tests.unit.spark.pipelines import Counting, Mending
from tests.unit.spark.plans import EVERY_TYPE, VALUES, Planned, Row, Staged, rows
from tests.unit.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytestmark = [pytest.mark.spark, pytest.mark.slow]


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
        code = run_work(
            ClassicSessions(spark_session()), self.uri, self.arrow, work, arrow=self.arrow
        )
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
    assert {name: (outcome.successful, outcome.failed) for name, outcome in outcomes.items()} == {
        f"b{n}": (0, 5) if n == 2 else (4, 1) for n in range(7)
    }
    assert bucket.entries(outcomes["b1"])["b1-0"].verdict.reason == "zero"


def test_every_schema_type_round_trips(bucket):
    seen: list[Any] = []

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        seen.append(messages.select("data.*").collect()[0].asDict(recursive=True))
        return failed(messages)

    def mend(messages: list[Message]) -> list[Message]:
        seen.append(messages[0].data)
        return messages

    Mending.mend = staticmethod(mend)
    row = Row("m0", VALUES, payload=b"body", properties="{}")
    plan = bucket.plan("default", [Planned("b0", [row])], schema=EVERY_TYPE)
    assert bucket.run(callback, plan, pipeline=Mending) == 0
    assert bucket.entries(bucket.outcome("default", "b0"))["m0"].payload == b"body"
    read, rebuilt = seen
    assert read["ts"].astimezone(UTC) == VALUES["ts"]
    assert {**read, "ts": VALUES["ts"], "y": bytes(read["y"])} == VALUES
    assert rebuilt == VALUES


def test_refusal_in_an_executor_leaves_its_batch_without_an_outcome(bucket, server, caplog):
    plan = bucket.plan("default", [Planned("b0", rows(5)), Planned("b1", rows(5, prefix="n"))])

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        server.denied = "test" if info.batch_id == "b0" else ""
        try:
            messages.collect()
        finally:
            server.denied = ""

    # When the credentials expire during a run
    assert bucket.run(callback, plan) == INCOMPLETE

    # Then the batch is not failed: a retry handles it
    assert {name: row.successful for name, row in bucket.outcomes("default").items()} == {"b1": 5}
    assert "messages of the batch b0 cannot be read back (cannot read batches/" in caplog.text
    assert "the store refused" in caplog.text


def test_missing_data_file_leaves_its_batch_without_an_outcome(bucket, caplog):
    batches = [Planned(f"b{n}", rows(2, prefix=f"b{n}-")) for n in range(2)]
    plan = bucket.plan("default", batches, batches_per_file=1)
    (bucket.root / plan.path / plan.data[0]).unlink()
    assert bucket.run(lambda messages, info: messages.count() and None, plan) == INCOMPLETE
    assert list(bucket.outcomes("default")) == ["b1"]
    assert "messages of the batch b0 cannot be read back (FileNotFoundError" in caplog.text


def test_row_groups_are_shared_by_the_tasks_of_a_batch(bucket, monkeypatch):
    # Given a merged batch of more bytes than a task reads
    monkeypatch.setattr("airflow_broadway.spark.arrow.TASK_BYTES", 20)
    batches = [Planned(f"b{n}", rows(3, prefix=f"b{n}-")) for n in range(6)]
    plan = bucket.plan("default", batches, batches_per_file=4)
    files = [f"{plan.path}/{name}" for name in plan.data]
    bucket.upload()
    from pyspark.sql import types as T  # noqa: N812

    schema = T.StructType([T.StructField("message_id", T.StringType())])
    frame = bucket.arrow.rows(spark_session(), files, [[1, 2], [4, 5]], schema, 60)
    assert frame.rdd.getNumPartitions() == 3
    parts = frame.rdd.glom().map(len).collect()
    assert sorted(parts) == [3, 3, 6]
    message_ids = sorted(row.message_id for row in frame.collect())
    assert message_ids == [f"b{n}-{i}" for n in (1, 2, 4, 5) for i in range(3)]


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (
            {"key": "AKIAWRONG"},
            "the store refused (the credentials of this process, bucket 'bucket-",
        ),
        ({}, "is not there for the Spark driver on host"),
        ({"bucket": "nowhere"}, "The specified bucket does not exist"),
    ],
    ids=["wrong credentials", "no file", "no bucket"],
)
def test_driver_that_cannot_read_its_work_refuses_before_a_session(
    server, monkeypatch, caplog, change, result
):
    root = server.root()
    server.denied = "AKIAWRONG"
    options = {**server.options(), "key": change.get("key", "test")}
    monkeypatch.setenv(CLIENT_VARIABLE, json.dumps(options))
    bucket = change.get("bucket", root.split("/")[2])
    uri = f"s3a://{bucket}/staging/Counting/dag/run"
    monkeypatch.setattr(job, "open_session", None)
    arguments = ["--client", "arrow", "--run", uri, "--work", "work/t-1.json", "--sha256", "0"]
    try:
        assert job.main(arguments) == REFUSED
    finally:
        server.denied = ""
    [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert result in error


def test_driver_without_the_client_of_the_store_names_missing_packages(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "airflow_broadway.spark.arrow", None)
    assert job.main(["--client", "arrow", "--run", "s3a://b/x/y/z", "--work", "w"]) == REFUSED
    assert "needs pyarrow, pandas, and fsspec with the client of the store (s3fs" in caplog.text


# -- whole runs ------------------------------------------------------------------------------------


@pytest.fixture
def lake(world, server, monkeypatch):
    """Yields a world whose staging root is a bucket by a connection; no process has other keys."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    conn_id = f"lake_{uuid.uuid4().hex}"
    extra = {"endpoint_url": server.endpoint, "region_name": "eu-west-1"}
    aws = {"conn_type": "aws", "login": "AKIALAKE", "password": "hush hush", "extra": extra}
    world.connect(conn_id, aws)
    world.connect("spark_default", {"conn_type": "spark", "host": "local[2]"})
    root = server.root()
    world.patch.setenv("AIRFLOW__BROADWAY__STAGING", root.replace("s3://", f"s3://{conn_id}@"))
    world.patch.syspath_prepend(ROOT / "tests" / "integration" / "pipelines" / "spark")
    world.bucket = server.store(root)
    server.denied = "none"
    yield world
    server.denied = ""


def run_figures(lake: Any, name: str = "Figures", **spark: Any) -> Any:
    """Runs a pipeline of two batchers on 40 messages."""
    from airflow_broadway.core.reference import import_class

    lake.numbers(range(1, 31), price=0.5)
    lake.numbers(range(31, 41), to="other")
    pipeline: Any = import_class(f"figures_pipeline:{name}")
    pipeline = pipeline(context={"output": f"{lake.folder}/output"})
    return lake.run(pipeline.dag("lake", default_args={"retries": 0}, spark=spark))


def check_exactly_once(lake: Any, ran: Any) -> None:
    """Checks that each message is settled once, and each row is in the output once."""
    assert ran.state == "success"
    [path] = [path for path in lake.bucket.fs.find(lake.bucket.root) if "report.json" in path]
    report = json.loads(lake.bucket.fs.cat_file(path))
    assert report["balanced"]
    totals = {name: count for name, count in report["totals"].items() if count}
    assert totals == {
        "received": 40, "failed": 5, "acked": 35, "dead_lettered": 5, "accounted": 40
    }  # fmt: skip
    table = ds.dataset(Path(lake.folder) / "output" / "default", partitioning="hive").to_table()
    numbers: Any = table["n"].to_pylist()
    assert sorted(numbers) == list(range(1, 31))


@pytest.mark.airflow
def test_run_with_a_bucket_needs_no_file_system_of_hadoop(lake, capfd):
    ran = run_figures(lake)

    check_exactly_once(lake, ran)
    log = "".join(capfd.readouterr())
    assert "is read through arrow: Hadoop has no file system for s3a" in log
    first = next(line for line in log.splitlines() if "airflow-broadway 0" in line)
    assert "is read through arrow" in first
    assert "hush" not in log


@pytest.mark.airflow
def test_run_with_a_bucket_uses_s3a_where_spark_has_it(lake, capfd):
    jars = ROOT / "build" / "s3a"
    if not (jars / ".whole").exists():
        pytest.skip("no S3A here: scripts/setup.sh --s3a, which needs mvn and fetches 700 MB")
    ran = run_figures(lake, conf={"spark.driver.extraClassPath": f"{jars}/*"})

    check_exactly_once(lake, ran)
    log = "".join(capfd.readouterr())
    assert "is read through hadoop: Hadoop has a file system for s3a" in log
    assert "hush" not in log


@pytest.mark.airflow
def test_driver_killed_after_its_write_is_followed_by_another(lake):
    check_exactly_once(lake, run_figures(lake, "Interrupted"))


@pytest.mark.airflow
@pytest.mark.parametrize(
    ("spark", "result"),
    [
        (
            {
                "env_vars": {
                    "PYSPARK_PYTHON": f"{sys.base_prefix}/bin/python3",
                    "PYSPARK_DRIVER_PYTHON": sys.executable,
                }
            },
            "an executor cannot read s3://{root}/",
        ),
        (
            {"staging_client": "hadoop"},
            "staging_client is 'hadoop', but this Spark's Hadoop has no file system for s3a: set",
        ),
    ],
    ids=["executor without Arrow", "Hadoop without s3a"],
)
def test_spark_that_cannot_read_the_bucket_is_one_clear_error(lake, capfd, spark, result):
    ran = run_figures(lake, **spark)

    assert ran.state == "failed"
    assert ran.states["handle_batches"] == "failed"
    log = "".join(capfd.readouterr())
    assert result.format(root=lake.bucket.root) in log
    assert log.count("Spark-Submit cmd") == 1  # one driver
    assert lake.depth[3] == 0  # no dead letter
