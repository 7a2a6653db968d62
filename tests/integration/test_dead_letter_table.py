"""A dead-letter table in PostgreSQL, of a pipeline at RabbitMQ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import RetryPolicy
from airflow_broadway.core.model.sink import SinkError
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.producers.rabbitmq.settle import settlement as settling
from airflow_broadway.runs.dead_letter_table import check_table
from airflow_broadway.sinks import PostgresTable
from tests.cluster.services import PostgreSQL, ServiceMissing
from tests.rabbitmq_place import Place
from tests.sink_subjects import Connections
from tests.unit.runs.steps import AS_AIRFLOW, TEN, Point, Run, Sums, dies

pytestmark = pytest.mark.broker

DEAD = [5, 7, 10]
ROOT = Path(__file__).parents[2]
PUBLISHED = Point(
    "airflow_broadway.producers.rabbitmq.settle.settlement:LeaseSettlement._report", "after"
)


@pytest.fixture
def place(place, monkeypatch):
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)
    monkeypatch.setattr(settling, "COUNT_TIMEOUT", 1.0)
    return place


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PostgreSQL]:
    try:
        server = PostgreSQL(tmp_path / "postgresql", "127.0.0.1")
    except ServiceMissing as error:
        pytest.skip(str(error))
    yield server
    server.stop()


class InPostgres(Sums):
    name = "Sums"
    dead_letter_table = PostgresTable(table="public.dead_letters")


@pytest.mark.parametrize("point", [PUBLISHED._replace(moment="before"), PUBLISHED], ids=str)
def test_each_dead_letter_has_one_row_after_a_crash_in_settlement_at_rabbitmq(
    place: Place, server: PostgreSQL, tmp_path: Path, point: Point
) -> None:
    import psycopg

    host, port = server.url.rpartition("@")[2].partition("/")[0].split(":")
    address: dict[str, Any] = {"host": host, "port": int(port)}
    connections = Connections({**address, "login": "airflow", "schema": "airflow"})
    InPostgres.producer = RabbitMQProducer(
        queue=place.name,
        uri=place.server.uri,
        on_failure="retry",
        retry=RetryPolicy(max_attempts=1),
    )

    def run(number: int) -> Run:
        def pipeline(producer: object, **options: Any) -> InPostgres:
            return InPostgres(**options)

        ports = replace(AS_AIRFLOW, connections=connections)
        finished = ["manual__1"] if number > 1 else []
        return Run(
            tmp_path,
            f"manual__{number}",
            pipeline=pipeline,  # type: ignore[arg-type]
            ports=ports,
            create=False,
            finished=finished,
        )

    first = run(1)
    with psycopg.connect(**address, user="airflow", dbname="airflow") as session:
        # Given a table that lacks a column, and then the documentation's table
        session.execute("CREATE TABLE dead_letters (message_id text)")
        session.commit()
        with pytest.raises(SinkError, match='column "payload" of relation "dead_letters" does not'):
            check_table(first.staged, first.pipeline, connections)
        page = (ROOT / "docs/dead-letters.md").read_text()
        [statement] = re.findall(r"CREATE TABLE public\.dead_letters[^;]*", page)
        session.execute(f"DROP TABLE dead_letters; {statement}")
        session.commit()
        check_table(first.staged, first.pipeline, connections)
        place.send(*(b"%d" % number for number in TEN))

        # When a settlement crashes, and the next run repeats it
        first.batch(first.process())
        dies(first.ack, point)
        second = run(2)
        pulled = second.process()
        if pulled["batchers"]:
            second.batch(pulled)
        second.ack()

        # Then each dead letter has one row, though RabbitMQ may have it twice
        rows = session.execute(
            "SELECT payload_text::int, payload, reason, received_at <= settled_at FROM dead_letters"
            " ORDER BY 1"
        ).fetchall()
    reasons = {5: "five", 7: "seven", 10: "five"}
    assert rows == [(n, b"%d" % n, reasons[n], True) for n in DEAD]
    with closing(place.producer().dead_letters(place.env())) as letters:
        assert {int(letter.body) for letter in letters.letters()} == {*DEAD}
