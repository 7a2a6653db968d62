"""Copies under two ids at a real RabbitMQ: each message's rows are committed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pika
import pytest

from airflow_broadway import RetryPolicy
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.producers.rabbitmq.settle import settlement as settling
from tests.rabbitmq_place import Breaker, Place
from tests.unit.runs.steps import Point, Run, balanced, dies
from tests.unit.runs.test_sinks import Folder, batch, make, numbers

pytestmark = pytest.mark.broker

#: A bundle is confirmed, and its deliveries are not acknowledged.
CONFIRMED = Point(
    "airflow_broadway.producers.rabbitmq.receive.consumer:Consumer._before_ack", "before"
)
#: Settled messages are published, and their holding queue is not emptied.
PUBLISHED = Point(
    "airflow_broadway.producers.rabbitmq.settle.settlement:LeaseSettlement._report", "after"
)
#: A client's ``basic.ack``.
ACK_FRAME = b"\x00\x3c\x00\x50"


@pytest.fixture
def place(place, monkeypatch):
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)
    monkeypatch.setattr(settling, "COUNT_TIMEOUT", 1.0)
    return place


def make_run(
    place: Place,
    folder: Path,
    number: int = 1,
    *,
    ended: Sequence[int] | None = None,
    **producer: Any,
) -> Run:
    """Returns a run of a pipeline on the queue.

    :param ended: The numbers of runs that have ended; by default all earlier ones.
    """

    class OnRabbit(Folder):
        name = "Sums"

    OnRabbit.producer = RabbitMQProducer(
        queue=place.name,
        uri=producer.pop("uri", place.server.uri),
        on_failure="retry",
        retry=RetryPolicy(max_attempts=1),
        **producer,
    )

    def pipeline(producer: object, **options: Any) -> Folder:
        return OnRabbit(**options)

    finished = [f"manual__{item}" for item in (range(1, number) if ended is None else ended)]
    return make(folder, f"manual__{number}", pipeline=pipeline, create=False, finished=finished)


def send(place: Place, values: range, *, with_ids: bool = True) -> None:
    for value in values:
        key = f"order-{value}" if with_ids else None
        place.send(b"%d" % value, properties=pika.BasicProperties(message_id=key))


def run_all_tasks(run: Run, **budget: Any) -> dict[str, int]:
    """Runs every task once; returns the report's totals."""
    pulled = run.process(**budget)
    if pulled["batchers"]:
        batch(run, pulled)
    return balanced(run.ack())


@pytest.mark.parametrize("messages", [1, None], ids=["in several runs", "in one run"])
def test_rows_are_committed_once_where_a_process_dies_before_its_ack(
    place: Place, tmp_path: Path, messages: int | None
) -> None:
    # Given messages that are both in the queue and in a dead run's bundle
    send(place, range(1, 5))
    dies(make_run(place, tmp_path).process, CONFIRMED)

    # When later runs receive both
    totals = Counter[str]()
    for number in range(2, 12):
        run = make_run(place, tmp_path, number)
        totals.update(run_all_tasks(run, max_messages=messages))
        if not place.depth(place.name):
            break

    # Then the copy is acknowledged
    assert numbers(run) == [1, 2, 3, 4]
    assert totals["already_applied"] + totals["duplicates"] == 4
    assert totals["acked"] == 8
    assert totals["without_identity"] == 0


def test_rows_are_committed_once_where_two_runs_hold_a_copy_each(
    place: Place, tmp_path: Path
) -> None:
    send(place, range(1, 5))
    dies(make_run(place, tmp_path).process, CONFIRMED)

    # When two runs receive some each, before one of them is settled
    runs = [make_run(place, tmp_path, 2), make_run(place, tmp_path, 3, ended=[1])]
    pulled = [runs[0].process(max_messages=4), runs[1].process()]
    totals = Counter[str]()
    for run, reference in zip(runs, pulled, strict=True):
        if reference["batchers"]:
            batch(run, reference)
        totals.update(balanced(run.ack()))
    later = make_run(place, tmp_path, 4)
    totals.update(run_all_tasks(later))

    assert numbers(later) == [1, 2, 3, 4]
    assert totals["released"] == totals["received"] - 8
    assert totals["acked"] == 8


def test_rows_are_committed_once_where_a_connection_breaks_before_the_ack(
    place: Place, tmp_path: Path
) -> None:
    # Given a connection that breaks when deliveries are acknowledged, whose bundle is confirmed
    send(place, range(1, 5))
    with Breaker(place.server.address) as breaker:
        uri = f"{breaker.uri}/?management_url=false"
        run = make_run(place, tmp_path, uri=uri, backoff_min=0.1, backoff_max=0.2)
        breaker.arm(ACK_FRAME)
        totals = Counter(run_all_tasks(run))
        assert breaker.broken == 1

    # When a later run receives the messages in no manifest
    later = make_run(place, tmp_path, 2)
    totals.update(run_all_tasks(later))

    assert numbers(later) == [1, 2, 3, 4]
    assert (totals["acked"], totals["already_applied"]) == (8, 4)


@pytest.mark.parametrize("with_ids", [True, False])
def test_rows_are_committed_once_where_a_settlement_releases_twice(
    place: Place, tmp_path: Path, with_ids: bool
) -> None:
    # Given messages that a settlement releases twice, since it died after the first release
    send(place, range(1, 4), with_ids=with_ids)
    first = make_run(place, tmp_path)
    first.process()
    dies(first.ack, PUBLISHED)
    first.ack()

    # When later runs receive one each
    totals = Counter[str]()
    for number in range(2, 10):
        run = make_run(place, tmp_path, number)
        totals.update(run_all_tasks(run, max_messages=1))

    assert numbers(run) == [1, 2, 3]
    assert totals["without_identity"] == (0 if with_ids else totals["received"])


@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, [1, 1, 2, 2]), ({"message_identity": "message_id"}, [1, 2])],
    ids=["by default", "declared"],
)
def test_a_publishers_copies_are_detected_where_an_identity_is_declared(
    place: Place, tmp_path: Path, options: dict[str, Any], rows: list[int]
) -> None:
    for number in (1, 2):
        send(place, range(1, 3))
        run = make_run(place, tmp_path, number, **options)
        run_all_tasks(run)

    assert numbers(run) == rows
    assert place.depth(place.name) == 0
