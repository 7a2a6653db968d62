"""Hours of a Kafka topic, archived by live runs in a real Airflow, and backfilled without Kafka.

Once with staging in a bucket, and once on Spark: no package index has Spark's jars for buckets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.staging.archive.reader import look
from airflow_broadway.staging.archive.table import archive_folder
from airflow_broadway.staging.store import Store
from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home
from tests.kafka_fixtures import skip_without_apache_kafka
from tests.kafka_server import ApacheKafka
from tests.s3_server import s3_server
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

DAGS = ROOT / "tests" / "integration" / "pipelines" / "kept_hours"
HOURS = 3
PER_HOUR = 40
START = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)


@contextmanager
def filled_kafka(folder: Path) -> Iterator[ApacheKafka]:
    """Starts a Kafka with messages of each hour, and of those around, in both partitions."""
    skip_without_apache_kafka()
    with ApacheKafka.start(folder / "kafka") as kafka:
        for topic, partitions in (("hours", 2), ("hours.retry", 1), ("hours-dlt", 1)):
            kafka.topic(topic, partitions)
        sender = kafka.producer()
        for number in range(message_count()):
            at = START + timedelta(seconds=number * 3600 / PER_HOUR) - timedelta(hours=1)
            timestamp = round(at.timestamp() * 1000)
            sender.produce("hours", b"%d" % number, partition=number % 2, timestamp=timestamp)
        assert not sender.flush(30)
        yield kafka


def message_count() -> int:
    return (HOURS + 2) * PER_HOUR


def rows(folder: Path) -> Counter[int]:
    """Counts the rows of each number."""
    counts: Counter[int] = Counter()
    for path in (folder / "rows").glob("hour=*/batch_id=*/*.json"):
        counts.update(json.loads(line)["number"] for line in path.read_text().splitlines())
    return counts


def test_a_backfill_from_a_bucket_archive_reads_nothing_from_kafka(tmp_path):
    with s3_server() as server:
        uri = server.root()
        aws = {
            "conn_type": "aws",
            "login": "test",
            "password": "test",
            "extra": {"endpoint_url": server.endpoint, "region_name": "us-east-1"},
        }
        staging = uri.replace("s3://", "s3://aws_hours@")
        connections = {"AIRFLOW_CONN_AWS_HOURS": json.dumps(aws)}
        check(tmp_path, "hours_python", staging, connections, server.store(uri))


@pytest.mark.spark
def test_an_archive_is_backfilled_on_spark(tmp_path):
    uri = f"file://{tmp_path / 'staging'}"
    check(tmp_path, "hours_spark", uri, {}, Store.open(uri))


def check(
    folder: Path, dag_id: str, staging: str, connections: dict[str, str], store: Store
) -> None:
    with filled_kafka(folder) as kafka, airflow_of(folder, staging, kafka, connections) as airflow:
        airflow.wait_for_dag(dag_id)
        # Given live runs of all messages, a scheduled one among them
        airflow.pause(dag_id, False)
        live = airflow.trigger(dag_id)
        assert airflow.wait_for_run(dag_id, live, timeout=300) == "success"
        eventually(lambda: states_of(airflow, dag_id) == {"success"}, timeout=300)
        assert rows(folder) == Counter(range(message_count()))
        name = {"hours_python": "HoursInPython", "hours_spark": "HoursOnSpark"}[dag_id]
        archive = archive_folder(store, name)
        assert look(archive).messages == message_count()

        # When some of its hours are backfilled, two at a time, without Kafka
        kafka.stop()
        states = backfill_hours(airflow, dag_id)

        # Then each message has its row, once
        assert states == ["success"] * HOURS
        assert rows(folder) == Counter(range(message_count()))
        assert look(archive).messages == message_count()


@contextmanager
def airflow_of(
    folder: Path, staging: str, kafka: ApacheKafka, connections: dict[str, str]
) -> Iterator[LocalAirflow]:
    env = airflow_env(
        home=made_home(folder / "airflow"),
        dags=DAGS,
        port=free_port(),
        # The two Dags have one group: only one of them is to run.
        settings={"broadway.staging": staging, "core.dags_are_paused_at_creation": "True"},
    )
    env |= connections
    env["AIRFLOW_CONN_KAFKA_HOURS"] = json.dumps(kafka.connection())
    env["AIRFLOW_VAR_HOURS_ROWS"] = str(folder / "rows")
    parts = ("api-server", "scheduler", "dag-processor")
    with LocalAirflow(env, folder / "logs", components=parts) as airflow:
        yield airflow


def states_of(airflow: LocalAirflow, dag_id: str) -> set[str]:
    return {run["state"] for run in airflow.api("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]}


def backfill_hours(airflow: LocalAirflow, dag_id: str) -> list[str]:
    """Backfills the hours as ``airflow backfill create`` does; returns each run's state."""
    body: dict[str, Any] = {
        "dag_id": dag_id,
        "from_date": START.isoformat(),
        "to_date": (START + timedelta(hours=HOURS - 1)).isoformat(),
        "max_active_runs": 2,
        "reprocess_behavior": "none",
    }
    # SQLite has one writer: Airflow cannot create a backfill there next to other writers.
    writers = ("scheduler", "dag-processor")
    for name in writers:
        process = airflow.processes.pop(name)
        process.terminate()
        process.wait(60)
    airflow.api("POST", "/backfills", body)
    for name in writers:
        airflow.start_component(name)
    airflow.wait_healthy()
    states: list[str] = []

    def is_over() -> bool:
        response = airflow.api("GET", f"/dags/{dag_id}/dagRuns", run_type="backfill")
        states[:] = [run["state"] for run in response["dag_runs"]]
        return len(states) == HOURS and {*states} <= {"success", "failed"}

    eventually(is_over, timeout=600)
    return states
