"""``airflow-broadway check``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import socket
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
from airflow import settings
from airflow.providers.common.compat.sdk import AirflowException

from airflow_broadway import Batcher
from airflow_broadway.cli import check
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import TEXT
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.reading import hosts
from airflow_broadway.sinks import IcebergTable, PostgresTable
from airflow_broadway.staging import run_folder
from airflow_broadway.staging.disk import Disk
from airflow_broadway.submit.hook import SubmitHook
from tests.cli_runs import Ran, make_shop, ran
from tests.unit.passing import Passing


@options
class CheckedProducer(Producer):
    kind: ClassVar[str] = "checked"
    results: ClassVar[dict[str, list[Finding] | Exception]] = {}

    name: str = option(default="queue", rule=TEXT, doc="The queue.")

    def shards(self) -> Sequence[Producer]:
        return [CheckedProducer(name=name) for name in self.results]

    def check(self, env: ProducerEnv) -> list[Finding]:
        assert env.pipeline == "Checked"
        result = self.results[self.name]
        if isinstance(result, Exception):
            raise result
        return result


class Checked(Passing):
    producer: Any = CheckedProducer()


class Embedded(Passing):
    producer = SqliteProducer(queue="orders", path="/nowhere/q.db")


class Unchecked(Passing):
    producer = Producer()


ERROR = Finding("error", "the queue 'orders' does not exist: create it")
WARNING = Finding("warning", "the limit of 3 deliveries is below 5 attempts: raise it")
NOTE = Finding("note", "policies are not visible without the tag management")


@pytest.fixture(autouse=True)
def _staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")


def checked(monkeypatch: Any, capsys: Any, *results: Any, arguments: Sequence[str] = ()) -> Ran:
    by_name = {f"queue-{number}": result for number, result in enumerate(results)}
    monkeypatch.setattr(CheckedProducer, "results", by_name)
    return ran(capsys, "check", "--pipeline", f"{__name__}:Checked", *arguments)


def test_errors_are_printed_before_warnings(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, [NOTE, WARNING], [WARNING, ERROR])

    assert result.code == 1
    levels = [line.partition(":")[0] for line in result.out.splitlines()]
    assert levels == ["error", "warning", "note", "note", "note"]
    for finding in (ERROR, WARNING, NOTE):
        assert f"{finding.level}: {finding.text}" in result.out.splitlines()


def test_warnings_do_not_stop_a_run(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, [WARNING], [])

    assert result.code == 0
    lines = result.out.splitlines()
    assert (lines[0], lines[-1]) == (f"warning: {WARNING.text}", "A run of Checked can begin.")


def test_json_has_level_and_text(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, [ERROR], arguments=["--json"])

    assert result.code == 1
    found, *notes = json.loads(result.out)
    assert found == {"level": "error", "text": ERROR.text}
    assert {finding["level"] for finding in notes} == {"note"}


def test_refused_queue_is_an_error_and_others_are_checked(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, ProducerError("access denied to queue-0"), [WARNING])

    assert result.code == 1
    assert result.out.startswith(f"error: access denied to queue-0\nwarning: {WARNING.text}\n")


def test_unreachable_broker_is_an_error(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, ProducerUnavailable("broker:5672 cannot be reached"))

    assert (result.code, result.err) == (1, "")
    assert "error: broker:5672 cannot be reached\n" in result.out


def test_malformed_reference_ends_with_code_2(capsys):
    assert "is no JSON" in ran(capsys, "check", "--pipeline", "{").error


def test_embedded_queue_is_checked(tmp_path, capsys):
    SqliteQueue(tmp_path / "q.db", "orders").create()

    def check(queue, file="q.db"):
        producer = {"queue": queue, "path": str(tmp_path / file)}
        reference = {"class": f"{__name__}:Embedded", "options": {"producer": producer}}
        return ran(capsys, "check", "--pipeline", json.dumps(reference))

    fine, misspelt, missing = check("orders"), check("ordres"), check("orders", "none.db")

    assert (fine.code, fine.out.splitlines()[-1]) == (0, "A run of Embedded can begin.")
    assert misspelt.code == 1
    assert "has no queue 'ordres'; it has ['orders']" in misspelt.out
    assert missing.code == 1
    assert f"error: there is no queue file {tmp_path / 'none.db'}, " in missing.out


def test_producer_without_checks_gets_a_note(capsys):
    result = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")

    assert result.code == 0
    assert "note: Producer has nothing that can be checked" in result.out


# -- the installation ------------------------------------------------------------------------------


def test_versions_that_do_not_fit_are_errors(monkeypatch, capsys):
    installed = {"apache-airflow": "2.9.3", "pyspark": "4.2.0", "pyspark-client": "4.1.0"}
    monkeypatch.setattr(check, "_version", lambda name: installed.get(name, ""))

    result = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")

    assert result.code == 1
    assert "error: apache-airflow 2.9.3 is installed, and airflow-broadway" in result.out
    assert "pip install 'apache-airflow" in result.out
    assert "error: pyspark 4.2.0 and pyspark-client 4.1.0 share a folder" in result.out


def test_client_of_an_extra_that_is_too_old_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(check, "_version", lambda name: "1.0" if name == "pika" else "")

    result = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")

    assert result.code == 0
    assert result.out.startswith("warning: pika 1.0 is installed, and airflow-broadway")


# -- staging ---------------------------------------------------------------------------------------


def test_staging_seen_by_other_hosts_names_them(tmp_path, monkeypatch, capsys):
    # Given a check on another host, and a run of a worker on a third one
    (tmp_path / "shop").mkdir()
    shop = make_shop(tmp_path / "shop", monkeypatch)
    with monkeypatch.context() as elsewhere:
        for module in (hosts, check):
            elsewhere.setattr(module, "host_name", lambda: "worker-2")
        alone = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_folder, "host_name", lambda: "worker-3")
        shop.send([{"n": 1, "shop": "a"}])
        shop.settled_run()

    # When this host is checked
    result = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")

    # Then it names both, and a host that is alone says so
    assert result.code == alone.code == 0
    [line] = [line for line in result.out.splitlines() if "the staging root" in line]
    assert "it was also used by 'worker-3' (20" in line
    assert ", 'worker-2' (20" in line
    assert "no other host has used it" in alone.out
    assert [path.name for path in (shop.folder / "staging/.shared/hosts").glob("probe*")] == []


def test_staging_root_that_is_a_file_is_an_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    root = f"file://{tmp_path}/file"

    result = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked", "--staging", root)

    assert result.code == 1
    assert f"error: the staging folder {root} is a file; set" in result.out


def test_staging_root_that_creates_a_file_twice_is_an_error(monkeypatch, capsys):
    def create(self: Disk, path: str, chunks: Sequence[bytes]) -> bool:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"".join(chunks))
        return True

    monkeypatch.setattr(Disk, "create", create)

    result = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")

    assert result.code == 1
    assert "creates it twice: set" in result.out


# -- Dags ------------------------------------------------------------------------------------------


def dags(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr(settings, "DAGS_FOLDER", str(folder))
    monkeypatch.syspath_prepend(str(folder))


CHECKED_PIPELINE = """
    from airflow_broadway import Batcher, Broadway
    from airflow_broadway.producers.sqlite import SqliteProducer

    class {name}(Broadway):
        producer = SqliteProducer(queue="orders", path="/nowhere/{name}.db")
        batchers = {{"default": Batcher(engine="python")}}

        def handle_message(self, processor, message, context):
            return message

        def handle_batch(self, batcher, messages, batch_info, context):
            return messages
"""


def test_pipelines_and_import_errors_of_all_dags_are_checked(tmp_path, monkeypatch, capsys):
    # Given a Dag with a pipeline, one with a mistyped option, and another that fails to import
    dags(
        tmp_path / "dags",
        monkeypatch,
        all_good_pipeline=CHECKED_PIPELINE.format(name="AllGood"),
        good='from all_good_pipeline import AllGood\ndag = AllGood.dag("airflow_good")\n',
        typo='from all_good_pipeline import AllGood  # airflow\ndag = AllGood.dag("t", sprak={})\n',
        other="import no_such_module  # an airflow dag\n",
    )

    # When all is checked
    result = ran(capsys, "check")

    # Then the pipeline's queue is reported, and both import errors, with their last line
    assert result.code == 1
    assert "error: there is no queue file /nowhere/AllGood.db" in result.out or (
        "error: the queue file /nowhere/AllGood.db cannot be opened" in result.out
    )
    typo = [line for line in result.out.splitlines() if "/typo.py" in line]
    other = [line for line in result.out.splitlines() if "/other.py" in line]
    assert [line.partition(":")[0] for line in typo] == ["error"]
    assert "sprak" in typo[0]
    assert other == [
        f"warning: the Dag file {tmp_path}/dags/other.py cannot be imported:"
        " ModuleNotFoundError: No module named 'no_such_module'"
    ]


def test_dag_folder_without_a_pipeline_is_a_warning(tmp_path, monkeypatch, capsys):
    dags(tmp_path / "dags", monkeypatch)

    result = ran(capsys, "check")

    assert result.code == 0
    assert "warning: no Dag has a pipeline: pass --pipeline REF" in result.out


# -- connections and sinks -------------------------------------------------------------------------

PASSWORD = "correct-horse-battery"

NOBODY = "127.0.0.1"


class Rabbit(Passing):
    producer = RabbitMQProducer(queue="q", on_failure="retry", reconnect_timeout=1)


class Kafka(Passing):
    producer = KafkaProducer(group_id="g", topics=["t"], settings={"socket.timeout.ms": 1_000})


class Sqs(Passing):
    producer = SqsProducer(queue_name="q", on_failure="retry")


class PubSub(Passing):
    producer = PubSubProducer(subscription="orders", project_id="shop-1", on_failure="noop")


class Tables(Passing):
    producer = Producer()
    batchers = {
        "default": Batcher(engine="python", sink=PostgresTable(table="a.b", conn_id="pg")),
        "other": Batcher(engine="python", sink=IcebergTable(table="a.b", conn_id="ice")),
    }


CONNECTIONS: dict[str, dict[str, Any]] = {
    "rabbitmq_default": {
        "conn_type": "rabbitmq",
        "host": NOBODY,
        "port": 1,
        "login": "u",
        "password": PASSWORD,
    },
    "kafka_default": {
        "conn_type": "kafka",
        "extra": {
            "bootstrap.servers": f"{NOBODY}:1",
            "sasl.username": "u",
            "sasl.password": PASSWORD,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
        },
    },
    "aws_default": {
        "conn_type": "aws",
        "login": "u",
        "password": PASSWORD,
        "extra": {
            "region_name": "eu-central-1",
            "endpoint_url": f"http://{NOBODY}:1",
            "config_kwargs": {"retries": {"max_attempts": 0}},
        },
    },
    "google_cloud_default": {
        "conn_type": "google_cloud_platform",
        "extra": {"keyfile_dict": {"type": "service_account", "private_key": PASSWORD}},
    },
    "pg": {
        "conn_type": "postgres",
        "host": NOBODY,
        "port": 1,
        "login": "u",
        "password": PASSWORD,
        "schema": "d",
    },
    "ice": {
        "conn_type": "generic",
        "host": f"http://{NOBODY}:1",
        "login": "u",
        "password": PASSWORD,
        "extra": {"type": "rest"},
    },
}


@pytest.mark.parametrize("pipeline", ["Rabbit", "Kafka", "Sqs", "PubSub", "Tables"])
@pytest.mark.parametrize("as_json", [False, True])
def test_no_password_is_printed(pipeline, as_json, monkeypatch, capsys):
    for conn_id, connection in CONNECTIONS.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))

    arguments = ["--json"] if as_json else []
    result = ran(capsys, "check", "--pipeline", f"{__name__}:{pipeline}", *arguments)

    assert (result.code, result.err) == (1, "")
    assert "error" in result.out
    assert PASSWORD not in result.out


def test_placeholder_in_a_connection_is_an_error(monkeypatch, capsys):
    connection = CONNECTIONS["pg"] | {"password": "CHANGE-ME"}
    monkeypatch.setenv("AIRFLOW_CONN_PG", json.dumps(connection))

    result = ran(capsys, "check", "--pipeline", f"{__name__}:Tables")

    assert result.code == 1
    assert "error: the connection 'pg' has the placeholder CHANGE-ME in password" in result.out
    assert "error: the Airflow connection 'ice' is not defined" in result.out


# -- Spark -----------------------------------------------------------------------------------------


class OnSpark(Passing):
    producer = Producer()
    batchers = {"default": Batcher()}


def test_java_that_is_missing_is_an_error_of_spark_batchers_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)

    spark = ran(capsys, "check", "--pipeline", f"{__name__}:OnSpark")
    python = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")

    assert spark.code == 1
    assert f"error: JAVA_HOME is '{tmp_path}', but there is no program" in spark.out
    assert python.code == 0


@pytest.mark.parametrize(
    ("name", "spark"),
    [("Remote", '{"remote": "sc://spark.example"}'), ("Connected", '{"conn_id": "server"}')],
)
def test_spark_connect_needs_no_java(tmp_path, monkeypatch, capsys, name, spark):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    server = {"conn_type": "spark_connect", "host": "spark.example"}
    monkeypatch.setenv("AIRFLOW_CONN_SERVER", json.dumps(server))
    spark_dag(tmp_path, monkeypatch, name, spark)

    result = ran(capsys, "check")

    assert result.code == 0, result.out


SPARK_PIPELINE = CHECKED_PIPELINE.replace('engine="python"', "").replace("return messages", "pass")


def spark_dag(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    spark: str = '{"conf": {"spark.sql.shuffle.partitions": "3"}}',
) -> str:
    """Writes a Dag whose pipeline has a Spark batcher, and a queue; returns its reference."""
    text = SPARK_PIPELINE.format(name=name).replace("/nowhere", str(tmp_path))
    module = f"{name.lower()}_pipeline"
    dag = f'from {module} import {name}\ndag = {name}.dag("airflow_{name}", spark={spark})\n'
    dags(tmp_path / "dags", monkeypatch, **{module: text, f"{name.lower()}_dag": dag})
    connection = {"conn_type": "spark", "host": "local[1]", "extra": {"deploy-mode": "client"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
    SqliteQueue(tmp_path / f"{name}.db", "orders").create()
    return f"{module}:{name}"


@pytest.mark.spark
@pytest.mark.slow
def test_spark_driver_of_the_dag_reads_and_writes_staging(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    reference = spark_dag(tmp_path, monkeypatch, "Submitted")

    result = ran(capsys, "check", "--spark", "--pipeline", reference)

    assert result.code == 0, result.out
    assert "note: the Spark driver of airflow_Submitted.broadway.handle_batches" in result.out
    assert f"Spark {version('pyspark')}, host {socket.gethostname()}" in result.out
    # And nothing of it is left
    assert list((tmp_path / "staging" / "Submitted").iterdir()) == []


def test_last_error_of_a_failed_driver_is_a_finding(tmp_path, monkeypatch, capsys):
    reference = spark_dag(tmp_path, monkeypatch, "Failing")

    def submit(self: SubmitHook, application: str = "", **kwargs: Any) -> None:
        assert self._conf["spark.sql.shuffle.partitions"] == "3"
        self.lines += ["INFO begun", "x ERROR staging is not there for the Spark driver", "end"]
        raise AirflowException("Cannot execute: spark-submit")

    monkeypatch.setattr(SubmitHook, "submit", submit)

    result = ran(capsys, "check", "--spark", "--pipeline", reference)

    assert result.code == 1
    assert "failed: staging is not there for the Spark driver\n" in result.out


def test_spark_without_a_dag_that_submits_is_a_warning(tmp_path, monkeypatch, capsys):
    dags(tmp_path / "dags", monkeypatch)

    result = ran(capsys, "check", "--spark", "--pipeline", f"{__name__}:OnSpark")

    assert "OnSpark to Spark, so --spark tried nothing" in result.out
