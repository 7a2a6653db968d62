"""The operator with a real Spark Connect server: the same outcomes as with a driver in a JVM."""

from __future__ import annotations

import json
import sys
import time
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import grpc
import psutil
import pytest
from airflow.providers.common.compat.sdk import AirflowException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from pyspark.sql.connect.session import SparkSession

from airflow_broadway.core.errors import OptionsError, PipelineError, StagingError
from airflow_broadway.core.model.sink import SinkError
from airflow_broadway.spark import failed
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.connect import ConnectSessions, Server
from scripts.local_airflow import free_port
from scripts.spark_connect import ConnectServer
from tests.integration.test_spark_arrow import Bucket
from tests.s3_server import s3_server
from tests.spark_operator import Lake
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, rows
from tests.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

BATCHES, ROWS = 3, 10

HANDLE_BATCH = """
        from pyspark.sql import SparkSession

        # Fails if another batch has the view, or its settings.
        spark = messages.sparkSession
        assert SparkSession.getActiveSession() is spark
        assert spark.conf.get("a.b", None) == "c", spark.conf.get("a.b", None)
        spark.conf.set("a.b", info.batch_id)
        messages.createTempView("batch")
        good = spark.sql("SELECT * FROM batch WHERE data.n % 5 != 0")
        return Rows(
            good.select("message_id", n("data.n").alias("n")),
            failed=failed(messages.where("data.n % 5 = 0"), reason="five"),
        )
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ConnectServer(tmp_path_factory.mktemp("connect")) as server:
        yield server


@pytest.fixture
def lake(tmp_path, monkeypatch):
    batches = [Planned(f"b{n}", rows(ROWS, prefix=f"b{n}-"), batch_key=n) for n in range(BATCHES)]
    return Lake(tmp_path, monkeypatch, HANDLE_BATCH, batches)


def expected_rows(lake):
    """Returns the rows that the table must have, each once."""
    return {name: 1 for name in lake.planned_rows() if int(name.rpartition("-")[2]) % 5}


def find_drivers():
    """Returns the drivers that this process has started."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # or a zombie
            if any("airflow_broadway_job.py" in word for word in process.cmdline()):
                processes.append(process)
    return processes


def find_workers(lake):
    """Returns the pids of Spark's Python workers that have begun rows."""
    return {int(file.name) for file in (lake.folder / "busy").iterdir()}


def filter_alive(pids):
    return {pid for pid in pids if psutil.pid_exists(pid)}


@contextmanager
def execute_in_thread(lake, operator):
    """Executes the task in a thread until two batches wait; yields its future."""
    (lake.folder / "wait").touch()
    with ThreadPoolExecutor() as pool:
        try:
            future = pool.submit(lake.execute_operator, operator)
            eventually(lambda: len(find_workers(lake)) > 1 or future.done(), 120.0)
            assert not future.done(), future.exception()
            yield future
        finally:
            (lake.folder / "wait").unlink(missing_ok=True)


def test_batches_run_on_a_server(lake, server):
    returned = lake.execute(remote=server.url, conf={"a.b": "c"})

    assert (returned["batches"], returned["failed"]) == (BATCHES, 0)
    assert lake.rows() == expected_rows(lake)
    for batch in lake.batches:
        outcome = lake.staged.outcome("default", batch.batch_id)
        assert (outcome.successful, outcome.failed) == (8, 2)
        assert {e.verdict.reason for e in lake.staged.entries(outcome).values()} == {"five"}


def test_python_of_a_server_is_checked_once_a_day(server, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "a day without other tests")
    check = Mock(side_effect=[StagingError("no"), None])
    for number in range(3):
        sessions = ConnectSessions(Server(url=server.url), {1: f"check {number}"})
        with suppress(StagingError):  # which is not recorded
            sessions.check_daily(check)
        sessions.close()

    assert check.call_count == 2


def test_address_of_a_server_comes_from_a_connection(lake, server, monkeypatch):
    host, _, port = server.url.removeprefix("sc://").partition(":")
    connection = {"conn_type": "spark_connect", "host": host, "port": int(port), "login": "ann"}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))

    lake.execute(conf={"a.b": "c"})

    assert lake.rows() == expected_rows(lake)


@pytest.mark.parametrize(
    ("line", "reason"),
    [("import not_shipped", "No module named 'not_shipped'"), ("1 / 0", "ZeroDivisionError")],
)
def test_task_raises_the_error_of_a_driver_that_cannot_load_the_pipeline(lake, line, reason):
    operator = lake.operator(remote=f"sc://127.0.0.1:{free_port()}")  # without any server
    (lake.folder / "code/not_shipped.py").touch()
    module = lake.folder / "code/lake_pipeline.py"
    module.write_text(f"{module.read_text()}\nimport sys\nif 'pytest' not in sys.modules: {line}\n")

    error = (
        rf"the driver refused to start: .*{reason}.*installed in the driver's Python, or be listed"
    )
    with pytest.raises(AirflowException, match=error):
        lake.execute_operator(operator)


@pytest.mark.slow
def test_a_killed_driver_is_followed_by_one_that_ends_its_jobs(lake, server):
    with execute_in_thread(lake, lake.operator(remote=server.url, conf={"a.b": "c"})) as future:
        [driver] = find_drivers()
        first = find_workers(lake)
        driver.kill()
        # The first workers wait for a file that still exists.
        eventually(lambda: find_workers(lake) - first and not filter_alive(first), 120.0)
        (lake.folder / "wait").unlink()
        returned = future.result(120.0)

    assert (returned["batches"], returned["failed"]) == (BATCHES, 0)
    assert lake.rows() == expected_rows(lake)


@pytest.mark.slow
def test_a_killed_task_ends_its_jobs(lake, server):
    operator = lake.operator(remote=server.url, conf={"a.b": "c"})
    with execute_in_thread(lake, operator) as future:
        operator.on_kill()
        with pytest.raises(AirflowException, match="have no outcome"):
            future.result(60.0)
        eventually(lambda: not filter_alive(find_workers(lake)), 60.0)
    assert lake.staged.outcomes("default") == {}

    # and a retry handles the batches
    lake.execute(remote=server.url, conf={"a.b": "c"})
    assert lake.rows() == expected_rows(lake)


@pytest.mark.slow
def test_a_driver_that_resumes_late_records_nothing(lake, server):
    arguments = {"remote": server.url, "conf": {"a.b": "c"}}
    with execute_in_thread(lake, lake.operator(**arguments)) as future:
        [driver] = find_drivers()
        driver.suspend()
        (lake.folder / "wait").unlink()
        lake.execute(**arguments)
        outcomes = lake.staged.outcomes("default")
        driver.resume()
        future.result(120.0)  # its task finds that each batch has an outcome

    assert lake.staged.outcomes("default") == outcomes
    assert lake.rows() == expected_rows(lake)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_restarted_server_loses_no_batch(lake, tmp_path, end):
    with ConnectServer(tmp_path / "server") as server:
        operator = lake.operator(remote=server.url, conf={"a.b": "c"})
        with execute_in_thread(lake, operator) as future:
            getattr(server, end)()
            server.start()
            (lake.folder / "wait").unlink()
            returned = future.result(200.0)  # the next application of the same task

    assert (returned["batches"], returned["failed"]) == (BATCHES, 0)
    assert lake.rows() == expected_rows(lake)


@pytest.mark.slow
def test_a_driver_suspended_for_too_long_fails_no_batch(lake, tmp_path):
    # Given a server that abandons a client's operations after a second, instead of minutes
    timeouts = {
        f"spark.connect.execute.{name}": "1s"
        for name in (
            "manager.detachedTimeout",
            "manager.maintenanceInterval",
            "reattachable.senderMaxStreamDuration",
        )
    }
    with ConnectServer(tmp_path / "server", timeouts) as server:
        operator = lake.operator(remote=server.url, conf={"a.b": "c"})
        with execute_in_thread(lake, operator) as future:
            [driver] = find_drivers()
            first = find_workers(lake)
            driver.suspend()
            eventually(lambda: not filter_alive(first), 60.0)  # the server has ended their jobs
            (lake.folder / "wait").unlink()
            driver.resume()
            returned = future.result(200.0)  # the next application of the same task

    assert (returned["batches"], returned["failed"]) == (BATCHES, 0)
    assert lake.rows() == expected_rows(lake)


def test_a_broken_connection_is_no_failure_of_its_batch(server):
    # Given a sink that hides the error of Spark, whose connection is restored by now
    def write():
        try:
            raise SparkConnectGrpcException("x", grpc_status_code=grpc.StatusCode.UNAVAILABLE)
        except SparkConnectGrpcException:
            raise SinkError("the table cannot be written") from None

    spark_sessions = open_sessions(server.url)
    try:
        with pytest.raises(SinkError) as raised:
            write()
        assert "is lost (SinkError" in spark_sessions.why_lost(raised.value)
        # Then an error of another system fails the batch, and so does one of its data
        assert spark_sessions.why_lost(ConnectionError("StatusCode.UNAVAILABLE")) == ""
        bad = spark_sessions.main.sql("SELECT CAST('StatusCode.UNAVAILABLE' AS INT)")
        with pytest.raises(SparkConnectGrpcException, match="CAST_INVALID_INPUT") as failed_cast:
            bad.collect()
        assert spark_sessions.why_lost(failed_cast.value) == ""
    finally:
        spark_sessions.close()


@pytest.mark.slow
def test_server_reads_a_bucket(tmp_path, server, monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with s3_server() as s3:
        bucket = Bucket(s3, tmp_path)
        plan = bucket.plan("default", [Planned("b0", rows(5)), Planned("b1", rows(5, prefix="c"))])
        monkeypatch.setattr(
            Counting, "callback", lambda rows, _: failed(rows.where("data.n = 0"), reason="zero")
        )
        work = bucket.work(Counting, plan)
        bucket.upload()
        spark_sessions = ConnectSessions(Server(url=server.url), {1: bucket.uri})
        try:
            bucket.arrow.check_executor(spark_sessions.main, f"{plan.path}/plan.jsonl")
            assert run_work(spark_sessions, bucket.uri, bucket.arrow, work, arrow=bucket.arrow) == 0
        finally:
            spark_sessions.close()
        bucket.files = bucket.arrow  # type: ignore[assignment]
        outcomes = bucket.outcomes("default").values()
        assert [(outcome.successful, outcome.failed) for outcome in outcomes] == [(4, 1), (4, 1)]


def test_sessions_keep_concurrent_changes_of_the_import_path(server, tmp_path, monkeypatch):
    # Given a callback that extends it while another batch's session is opened
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_artifacts = SparkSession.addArtifacts

    def add_concurrently(*arguments, **options):
        add_artifacts(*arguments, **options)
        sys.path.append("/own")

    monkeypatch.setattr(SparkSession, "addArtifacts", add_concurrently)
    code = tmp_path / "code.zip"
    zipfile.ZipFile(code, "w").close()
    spark_sessions = open_sessions(server.url, artifacts={"pyfile": [str(code)]})
    try:
        spark_sessions.open("b", "", "")
        assert (sys.path.count("/own"), sys.path.count(str(code))) == (2, 1)
    finally:
        spark_sessions.close()


# -- refusals --------------------------------------------------------------------------------------


def open_sessions(url, **server):
    return ConnectSessions(Server(url=url, **server), {1: str(uuid.uuid4())})


def test_absent_server_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("airflow_broadway.spark.connect.TIMEOUT", 0.5)
    url = f"sc://127.0.0.1:{free_port()}"
    expected = f"Spark Connect server {url} does not accept connections.*start it, or correct"
    with pytest.raises(PipelineError, match=expected) as raised:
        open_sessions(f"{url}/;token=hu/sh")
    assert "hu/sh" not in str(raised.value)


def test_invalid_server_url_is_refused_without_its_token():
    with pytest.raises(PipelineError, match=r"sc://host is not valid: expected") as raised:
        open_sessions("sc://host/;token=hush==")
    assert "hush" not in str(raised.value)


def test_older_server_is_refused(server, monkeypatch):
    monkeypatch.setattr("pyspark.__version__", "9.1.0")
    with pytest.raises(PipelineError, match=r"is older than this worker's pyspark 9\.1"):
        open_sessions(server.url)


def test_static_setting_of_a_running_server_is_refused(server):
    with pytest.raises(PipelineError, match=r"does not take the setting spark\.executor\.memory"):
        open_sessions(server.url, conf={"spark.executor.memory": "1g"})


def test_full_server_is_one_clear_error():
    # Given a server that refuses each call
    def refuse(_, context):
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many sessions")

    refusing = SimpleNamespace(service=lambda _: grpc.unary_unary_rpc_method_handler(refuse))
    full = grpc.server(ThreadPoolExecutor(2), handlers=[refusing])
    url = f"sc://127.0.0.1:{full.add_insecure_port('127.0.0.1:0')}"
    full.start()
    try:
        with pytest.raises(PipelineError, match=r"opens no session: .*too many sessions"):
            open_sessions(url)
    finally:
        full.stop(None)


def test_arguments_of_spark_submit_are_refused_while_the_dag_is_parsed(lake):
    for arguments, name in (
        ({"remote": "spark://host:7077"}, "remote"),
        ({"remote": "sc://host", "conn_id": "spark"}, "remote"),
        ({"remote": "sc://host", "executor_memory": "1g"}, "executor_memory"),
        ({"remote": "sc://host", "jars": "a.jar"}, "jars"),
        ({"remote": "sc://host", "default_args": {"packages": "a:b:1"}}, "packages"),
        ({"remote": "sc://host", "conf": {"spark.hadoop.a": "b"}}, "conf.spark.hadoop.a"),
        ({"remote": "sc://host", "conf": {"spark.remote": "sc://b"}}, "conf.spark.remote"),
    ):
        with pytest.raises(OptionsError, match=f"option {name!r}"):
            lake.operator(**arguments)
