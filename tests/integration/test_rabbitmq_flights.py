"""``dags/rabbitmq_flights.py`` in a real Airflow, with a real RabbitMQ: the demo's own truth."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from scripts.airflow_env import airflow_env
from scripts.load_flights import flights
from scripts.load_rabbitmq import QUEUE, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.faults.brokers_rabbitmq import counted
from tests.rabbitmq_fixtures import wanted_server

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]

MESSAGES = 5_000


@pytest.mark.timeout(600)
def test_the_flights_through_rabbitmq(tmp_path: Path) -> None:
    from airflow_broadway.producers.rabbitmq.connection import address_of_uri
    from airflow_broadway.producers.rabbitmq.queues import Queues

    server = wanted_server()
    host, port = server.address
    expected = list(flights(MESSAGES))
    departed = [flight for flight in expected if flight["dep_delay"] is not None]
    load(address_of_uri(server.url, name="test"), MESSAGES)
    api = free_port()
    env = airflow_env(home=tmp_path / "airflow", port=api)
    env |= {
        "AIRFLOW_CONN_RABBITMQ_DEFAULT": json.dumps(
            {
                "conn_type": "rabbitmq",
                "host": host,
                "port": port,
                "login": "guest",
                "password": "guest",
            }
        )
    }

    parts = ("api-server", "scheduler", "dag-processor")
    with LocalAirflow(env, tmp_path / "logs", components=parts) as airflow:
        airflow.wait_for_dag("rabbitmq_flights")
        run = airflow.trigger("rabbitmq_flights", {"output": str(tmp_path / "output")})
        state = airflow.wait_for_run("rabbitmq_flights", run, timeout=400)

    assert state == "success"
    table = ds.dataset(tmp_path / "output" / "flights", format="parquet", partitioning="hive")
    assert table.count_rows() == len(departed)
    ids = table.to_table(columns=["message_id"])["message_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    assert counted(server, [QUEUE, Queues(QUEUE).returns]) == 0
    assert counted(server, [Queues(QUEUE).dead]) == MESSAGES - len(departed)
