"""Kafka in a real Airflow: its connection form, and a backfill next to a live run."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home
from tests.kafka_fixtures import skip_without_apache_kafka
from tests.kafka_server import ApacheKafka
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

DAGS = ROOT / "tests" / "integration" / "pipelines" / "backfilled"
#: The hours of the backfill; a message's body has its hour, and its number in that.
HOURS = 3
PER_HOUR = 40
START = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)


@pytest.fixture
def kafka(tmp_path):
    skip_without_apache_kafka()
    with ApacheKafka.start(tmp_path / "kafka") as server:
        server.topic("hours", 2)
        server.topic("hours-dlt")
        yield server


def fill(kafka: ApacheKafka) -> None:
    """Sends messages of each hour, and of those around: slightly disordered, in both partitions."""
    sender = kafka.producer()
    for hour in range(-1, HOURS + 1):
        for number in range(PER_HOUR):
            swapped = number ^ 1
            at = START + timedelta(hours=hour, seconds=swapped * 3600 / PER_HOUR)
            sender.produce(
                "hours",
                b"%d" % (100 * hour + swapped),
                partition=number // 2 % 2,
                timestamp=round(at.timestamp() * 1000),
            )
    assert not sender.flush(30)


def handled(folder: Path, run_id: str) -> list[tuple[int, int]]:
    lines = (folder / f"{run_id}.handled").read_text().splitlines()
    return sorted((int(number), int(redelivered)) for number, redelivered in map(str.split, lines))


def test_a_backfill_reads_its_interval_next_to_a_live_run(kafka, tmp_path):
    fill(kafka)
    env = airflow_env(
        home=made_home(tmp_path / "airflow"),
        dags=DAGS,
        port=free_port(),
        settings={
            "broadway.staging": f"file://{tmp_path / 'staging'}",
            "core.test_connection": "Enabled",
        },
    )
    env["AIRFLOW_VAR_BACKFILLED_FOLDER"] = str(tmp_path)
    parts = ("api-server", "scheduler", "dag-processor")
    with LocalAirflow(env, tmp_path / "logs", components=parts) as airflow:
        connect(airflow, kafka)
        airflow.wait_for_dag("backfilled")
        airflow.pause("backfilled", False)
        # Given a live run that holds messages
        live = airflow.trigger("backfilled")
        eventually((tmp_path / "live").exists, timeout=180)

        # When the hours are backfilled
        backfill(airflow, START, START + timedelta(hours=HOURS - 1))
        runs = [run_of(airflow, START + timedelta(hours=hour)) for hour in range(HOURS)]
        states = [airflow.wait_for_run("backfilled", run, timeout=300) for run in runs]

        # Then each run has read its own hour once, and the group's offsets are unchanged
        assert states == ["success"] * HOURS
        for hour, run in enumerate(runs):
            assert handled(tmp_path, run) == [(100 * hour + n, 0) for n in range(PER_HOUR)]
        assert {offset for offset, _ in kafka.committed("backfilled", "hours").values()} == {0}

        # And the live run receives all messages
        (tmp_path / "release").touch()
        assert airflow.wait_for_run("backfilled", live, timeout=300) == "success"
    everything = [100 * hour + n for hour in range(-1, HOURS + 1) for n in range(PER_HOUR)]
    assert handled(tmp_path, live) == [(number, 0) for number in everything]
    ends = {number: end for number, (_, end) in kafka.watermarks("hours").items()}
    committed = kafka.committed("backfilled", "hours")
    assert {number: offset for number, (offset, _) in committed.items()} == ends


def backfill(airflow: LocalAirflow, first: datetime, last: datetime) -> None:
    """Creates a backfill in the server's own process: SQLite has one writer."""
    body = {
        "dag_id": "backfilled",
        "from_date": first.isoformat(),
        "to_date": last.isoformat(),
        "max_active_runs": HOURS,
        "reprocess_behavior": "none",
    }
    airflow.api("POST", "/backfills", body)


def run_of(airflow: LocalAirflow, hour: datetime) -> str:
    """Waits for the backfill's run of an hour; returns its id."""
    names: list[str] = []

    def exists() -> bool:
        runs = airflow.api("GET", "/dags/backfilled/dagRuns", run_type="backfill")["dag_runs"]
        names[:] = [
            run["dag_run_id"]
            for run in runs
            if datetime.fromisoformat(run["data_interval_start"]) == hour
        ]
        return bool(names)

    eventually(exists, timeout=120)
    return names[0]


def connect(airflow: LocalAirflow, kafka: ApacheKafka) -> None:
    """Creates the connection as the form does, and tests it as its button does."""
    from airflow.providers.apache.kafka.hooks.base import KafkaBaseHook

    form = KafkaBaseHook.get_ui_field_behaviour()
    assert set(form["hidden_fields"]) == {"schema", "login", "password", "port", "host"}
    assert form["relabeling"] == {"extra": "Config Dict"}
    body = {
        "connection_id": "kafka_by_form",
        "conn_type": "kafka",
        "extra": json.dumps({"bootstrap.servers": kafka.bootstrap}),
    }
    tested = airflow.api("POST", "/connections/test", body)
    assert tested["status"] is True, tested
    unreachable = {**body, "extra": json.dumps({"bootstrap.servers": "127.0.0.1:1"})}
    assert airflow.api("POST", "/connections/test", unreachable)["status"] is False
    airflow.api("POST", "/connections", body)
