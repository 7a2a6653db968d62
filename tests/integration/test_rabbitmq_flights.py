"""``dags/rabbitmq_flights.py`` in a real Airflow, with RabbitMQ, checked against the flights sent.

Its user has only the permissions of the guide.  Its password must appear in no command line and in
no file.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from scripts.airflow_env import airflow_env
from scripts.load_flights import FLIGHTS, flights
from scripts.load_rabbitmq import QUEUE, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.rabbitmq_fixtures import wanted_server
from tests.rabbitmq_place import PASSWORD, permitted

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]

#: The permissions in docs/rabbitmq.md for the queue ``flights``, which the pipeline declares.
LEAST = {
    "configure": r"^(flights|broadway\..*)$",
    "write": r"^(broadway\..*|amq\.default)$",
    "read": r"^(flights|broadway\..*)$",
}


@contextmanager
def watch_commands(text: str) -> Iterator[list[str]]:
    """Collects the command lines of processes whose arguments contain ``text``."""
    commands: list[str] = []
    stop = threading.Event()

    def scan() -> None:
        while not stop.wait(0.2):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    arguments = file.read_bytes()
                except OSError:  # it has just ended
                    continue
                if text.encode() in arguments:
                    commands.append(arguments.replace(b"\0", b" ").decode(errors="replace"))

    watcher = threading.Thread(target=scan)
    watcher.start()
    try:
        yield commands
    finally:
        stop.set()
        watcher.join()


def find_files_with(text: str, folder: Path) -> list[str]:
    """Returns the files below a folder that contain ``text``: logs, staging, databases."""
    return [
        str(file)
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink() and text.encode() in file.read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("messages", [5_000, FLIGHTS])
def test_flights_dag_handles_every_message_of_rabbitmq(tmp_path, messages):
    from airflow_broadway.producers.rabbitmq.amqp.address import address_of_uri
    from airflow_broadway.producers.rabbitmq.broker.holding_queues import QueueNames

    server = wanted_server()
    expected = list(flights(messages))
    departed = [flight for flight in expected if flight["dep_delay"] is not None]
    load(address_of_uri(server.url, name="test"), messages)
    dead_before = server.count(QueueNames(QUEUE).dead)
    api = free_port()
    env = airflow_env(home=tmp_path / "airflow", port=api)
    parts = ("api-server", "scheduler", "dag-processor")
    with permitted(server, **LEAST) as user:
        env |= {"AIRFLOW_CONN_RABBITMQ_DEFAULT": json.dumps(server.connection(**user))}
        with (
            watch_commands(PASSWORD) as commands,
            LocalAirflow(env, tmp_path / "logs", components=parts) as airflow,
        ):
            airflow.wait_for_dag("rabbitmq_flights")
            run = airflow.trigger("rabbitmq_flights", {"output": str(tmp_path / "output")})
            state = airflow.wait_for_run("rabbitmq_flights", run, timeout=600)

    assert state == "success"
    table = ds.dataset(tmp_path / "output" / "flights", format="parquet", partitioning="hive")
    rows = table.to_table(columns=["message_id", "batcher", "origin"])
    assert rows.num_rows == len(departed)
    assert pc.count_distinct(rows["message_id"]).as_py() == len(departed)
    routed = zip(rows["batcher"].to_pylist(), rows["origin"].to_pylist(), strict=True)
    assert Counter(routed) == Counter(
        ("delayed" if flight["dep_delay"] > 15 else "on_time", flight["origin"])
        for flight in departed
    )
    assert server.count(QUEUE, QueueNames(QUEUE).held(0)) == 0
    assert server.count(QueueNames(QUEUE).dead) - dead_before == messages - len(departed)
    assert commands == []
    # Airflow's logs and database, with every XCom; staging; Spark's input.
    assert list(tmp_path.rglob("manifest*.json"))
    assert find_files_with(PASSWORD, tmp_path) == []
