"""Dead letters in a user's quorum queue, whose delivery limit counts each browse."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from airflow_broadway.core.custody.dead_letters import Choice
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.looks import RESERVE
from tests.rabbitmq_place import Place, manage
from tests.waiting import eventually

pytestmark = pytest.mark.broker

DEAD_LETTERS = 10


def declare(place: Place, **arguments: Any) -> str:
    """Declares a queue with ten dead letters; returns its name."""
    queue = f"{place.name}-dead"
    place.server.declare(queue, **{"x-queue-type": "quorum", **arguments})
    place.server.fill(queue, [b"letter %d" % number for number in range(DEAD_LETTERS)])
    return queue


def open_dead_letters(place: Place, queue: str, **extra: Any) -> Any:
    url = f"http://127.0.0.1:{place.server.management_port}"
    env = place.env(login="guest", password="guest", extra={"management_url": url, **extra})
    producer = place.producer(dead_letter=queue, uri=None)
    return closing(producer.dead_letters(env))


def browse(place: Place, queue: str, **extra: Any) -> int:
    with open_dead_letters(place, queue, **extra) as dead_letters:
        return len(list(dead_letters.letters()))


def browse_in_console(place: Place, queue: str, times: int) -> None:
    """Browses the queue as RabbitMQ's console does."""
    body = {"count": DEAD_LETTERS, "ackmode": "ack_requeue_true", "encoding": "auto"}
    for _ in range(times):
        assert len(manage(place.server, "POST", f"queues/%2F/{queue}/get", body)) == DEAD_LETTERS
        eventually(lambda: place.depth(queue) == DEAD_LETTERS)


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_browsing_never_deletes_dead_letters(undeclared, limit):
    queue = declare(undeclared, **{"x-delivery-limit": limit})
    counts, text = [], ""
    for _ in range(limit + 3):
        try:
            counts.append(browse(undeclared, queue))
        except ProducerError as error:
            counts.append(0)
            text = str(error)

    browses = max(0, limit - RESERVE)
    assert f"{queue!r} cannot be listed any more" in text
    assert f"the queue's delivery-limit is {limit}" in text
    assert counts == [DEAD_LETTERS] * browses + [0] * (limit + 3 - browses)
    assert undeclared.depth(queue) == DEAD_LETTERS


def test_a_delivery_limit_of_a_policy_is_respected(undeclared):
    queue = declare(undeclared)
    policy = {"pattern": f"^{queue}$", "definition": {"delivery-limit": 4}, "apply-to": "queues"}
    manage(undeclared.server, "PUT", f"policies/%2F/{queue}", policy)
    try:
        path = f"queues/%2F/{queue}"
        eventually(lambda: manage(undeclared.server, "GET", path).get("policy") == queue)
        assert [browse(undeclared, queue) for _ in range(2)] == [DEAD_LETTERS, DEAD_LETTERS]
        for _ in range(4):
            with pytest.raises(ProducerError, match="delivery-limit is 4"):
                browse(undeclared, queue)
    finally:
        manage(undeclared.server, "DELETE", f"policies/%2F/{queue}")
    assert undeclared.depth(queue) == DEAD_LETTERS


@pytest.mark.parametrize("times", [3, 4, 5])
def test_deliveries_to_other_clients_are_counted(undeclared, times):
    queue = declare(undeclared, **{"x-delivery-limit": 5})
    browse_in_console(undeclared, queue, times)

    for _ in range(4):
        with pytest.raises(ProducerError, match="cannot be listed any more"):
            browse(undeclared, queue)

    assert undeclared.depth(queue) == DEAD_LETTERS


def test_moving_some_dead_letters_is_limited_and_moving_all_is_not(place):
    queue = declare(place, **{"x-delivery-limit": 4})
    assert [browse(place, queue) for _ in range(2)] == [DEAD_LETTERS, DEAD_LETTERS]

    with open_dead_letters(place, queue) as dead_letters:
        for move in (dead_letters.requeue, dead_letters.delete):
            with pytest.raises(ProducerError, match="cannot be listed any more"):
                move(Choice(reason="none of them"))
        assert place.depth(queue) == DEAD_LETTERS
        assert dead_letters.requeue().count == DEAD_LETTERS
    assert place.depth(place.name) == DEAD_LETTERS

    # The queue is empty, so its next messages have the whole delivery limit
    assert browse(place, queue) == 0
    place.server.fill(queue, [b"another"])
    assert browse(place, queue) == 1


@pytest.mark.parametrize(
    "extra", [{"management_url": False}, {"management_url": "http://127.0.0.1:1"}]
)
def test_an_unknown_limit_refuses_browsing(undeclared, extra):
    queue = declare(undeclared, **{"x-delivery-limit": 5})

    for _ in range(7):
        with pytest.raises(
            ProducerError, match="whether the queue has a delivery limit is not known"
        ):
            browse(undeclared, queue, **extra)

    assert undeclared.depth(queue) == DEAD_LETTERS


def test_queues_without_limit_can_be_browsed_forever(undeclared):
    # RabbitMQ 3 has no default
    queue = declare(undeclared)
    assert [browse(undeclared, queue) for _ in range(25)] == [DEAD_LETTERS] * 25
