"""Child processes of a process task under a real scheduler: queries to Airflow, and crashes."""

from __future__ import annotations

import time
import uuid

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env, home_of
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

PIPELINE = """\
import os

from airflow_broadway import Batcher, Broadway, Processors
from airflow_broadway.producers.sqlite import SqliteProducer


class Lookup(Broadway):
    producer = SqliteProducer(
        queue="numbers", path=os.path.join(os.environ["LOOKUP_FOLDER"], "queue.db"), max_crashes=2
    )
    processors = Processors(concurrency=1, max_demand=200)
    batchers = {"default": Batcher(engine="python", batch_size=2_000, batch_timeout=None)}

    def setup(self, run):
        from airflow.sdk import Connection

        return Connection.get(os.environ["LOOKUP_NAME"]).host

    def handle_message(self, processor, message, context):
        from airflow.sdk import Variable

        number = int(message.data)
        if number == 537:
            os._exit(9)
        if number == 0:
            variable = Variable.get(os.environ["LOOKUP_NAME"])
            with open(os.path.join(os.environ["LOOKUP_FOLDER"], "lookups"), "a") as file:
                print(context, variable, file=file)
        return message.put_data(number)

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages
"""

DAG = """\
# airflow, dag
from lookup_pipeline import Lookup

dag = Lookup.dag("lookup", schedule=None, default_args={"retries": 0})
"""


def test_child_process_callbacks_read_connections_and_variables(tmp_path):
    # Given a connection and a variable in Airflow's database, and a message that ends its process
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "lookup_pipeline.py").write_text(PIPELINE)
    (tmp_path / "dags" / "lookups.py").write_text(DAG)
    settings = {
        "broadway.staging": f"file://{tmp_path / 'staging'}",
        "scheduler.task_instance_heartbeat_timeout": "12",
        "scheduler.task_instance_heartbeat_timeout_detection_interval": "2",
    }
    home = made_home(home_of(ROOT, "airflow-test-lookups"))
    env = airflow_env(home=home, dags=tmp_path / "dags", port=free_port(), settings=settings)
    name = f"lookup_{uuid.uuid4().hex}"  # the database is reused
    env |= {"LOOKUP_FOLDER": str(tmp_path), "LOOKUP_NAME": name}
    with (
        SqliteQueue(tmp_path / "queue.db", "numbers") as queue,
        LocalAirflow(env, tmp_path / "logs") as airflow,
    ):
        queue.send([b"%d" % number for number in range(1_000)])
        airflow.wait_for_dag("lookup", timeout=120)
        secret = f"from the database, {time.time()}"
        airflow.api("POST", "/variables", {"key": name, "value": secret})
        airflow.api(
            "POST",
            "/connections",
            {"connection_id": name, "conn_type": "generic", "host": "lookup.example"},
        )

        # When each of two runs is tried once
        states = [
            airflow.wait_for_run("lookup", airflow.trigger("lookup"), timeout=200) for _ in range(2)
        ]

        # Then the first fails, and the second queries Airflow in a child, and handles all others
        assert states == ["failed", "success"]
        depth = queue.depth()
        assert (depth.ready, depth.delayed, depth.leased, depth.dead) == (0, 0, 0, 1)
        [letter] = queue.dead_letters()
        assert letter.body == b"537"
        assert letter.reason.startswith("crashed: it ended 2 processes")
    lookups = (tmp_path / "lookups").read_text().splitlines()
    assert lookups == [f"lookup.example {secret}"] * len(lookups)
    assert len(lookups) >= 2
