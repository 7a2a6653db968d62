"""Dead letters in a quorum queue of the user's own, whose delivery limit counts each look."""

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

LETTERS = 10


def declare(place: Place, **arguments: Any) -> str:
    """A queue of dead letters with ten letters in it."""
    queue = f"{place.name}-dead"
    place.server.declare(queue, **{"x-queue-type": "quorum", **arguments})
    place.server.fill(queue, [b"letter %d" % number for number in range(LETTERS)])
    return queue


def opened(place: Place, queue: str, **extra: Any) -> Any:
    url = f"http://127.0.0.1:{place.server.management_port}"
    env = place.env(login="guest", password="guest", extra={"management_url": url, **extra})
    producer = place.producer(dead_letter=queue, uri=None)
    return closing(producer.dead_letters(env))


def look(place: Place, queue: str, **extra: Any) -> int:
    with opened(place, queue, **extra) as letters:
        return len(list(letters.letters()))


def look_from_outside(place: Place, queue: str, times: int) -> None:
    """Browses the queue as the button of RabbitMQ's console does."""
    body = {"count": LETTERS, "ackmode": "ack_requeue_true", "encoding": "auto"}
    for _ in range(times):
        assert len(manage(place.server, "POST", f"queues/%2F/{queue}/get", body)) == LETTERS
        eventually(lambda: place.depth(queue) == LETTERS)


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_browsing_never_deletes_letters(undeclared, limit):
    queue = declare(undeclared, **{"x-delivery-limit": limit})
    seen, text = [], ""
    for _ in range(limit + 3):
        try:
            seen.append(look(undeclared, queue))
        except ProducerError as error:
            seen.append(0)
            text = str(error)

    looks = max(0, limit - RESERVE)
    assert f"{queue!r} cannot be listed any more" in text
    assert f"the queue's delivery-limit is {limit}" in text
    assert seen == [LETTERS] * looks + [0] * (limit + 3 - looks)
    assert undeclared.depth(queue) == LETTERS


def test_a_limit_of_a_policy_counts_as_well(undeclared):
    queue = declare(undeclared)
    policy = {"pattern": f"^{queue}$", "definition": {"delivery-limit": 4}, "apply-to": "queues"}
    manage(undeclared.server, "PUT", f"policies/%2F/{queue}", policy)
    try:
        path = f"queues/%2F/{queue}"
        eventually(lambda: manage(undeclared.server, "GET", path).get("policy") == queue)
        assert [look(undeclared, queue) for _ in range(2)] == [LETTERS, LETTERS]
        for _ in range(4):
            with pytest.raises(ProducerError, match="delivery-limit is 4"):
                look(undeclared, queue)
    finally:
        manage(undeclared.server, "DELETE", f"policies/%2F/{queue}")
    assert undeclared.depth(queue) == LETTERS


@pytest.mark.parametrize("times", [3, 4, 5])
def test_deliveries_to_other_clients_are_counted(undeclared, times):
    queue = declare(undeclared, **{"x-delivery-limit": 5})
    look_from_outside(undeclared, queue, times)

    for _ in range(4):
        with pytest.raises(ProducerError, match="cannot be listed any more"):
            look(undeclared, queue)

    assert undeclared.depth(queue) == LETTERS


def test_moving_some_letters_counts_and_moving_all_does_not(place):
    queue = declare(place, **{"x-delivery-limit": 4})
    assert [look(place, queue) for _ in range(2)] == [LETTERS, LETTERS]

    with opened(place, queue) as letters:
        for move in (letters.requeue, letters.delete):
            with pytest.raises(ProducerError, match="cannot be listed any more"):
                move(Choice(reason="none of them"))
        assert place.depth(queue) == LETTERS
        assert letters.requeue().count == LETTERS
    assert place.depth(place.name) == LETTERS

    # The queue is empty, so what comes next is not burdened with the looks at what was there
    assert look(place, queue) == 0
    place.server.fill(queue, [b"another"])
    assert look(place, queue) == 1


@pytest.mark.parametrize(
    "extra", [{"management_url": False}, {"management_url": "http://127.0.0.1:1"}]
)
def test_an_unknown_limit_refuses_browsing(undeclared, extra):
    queue = declare(undeclared, **{"x-delivery-limit": 5})

    for _ in range(7):
        with pytest.raises(
            ProducerError, match="whether the queue has a delivery limit is not known"
        ):
            look(undeclared, queue, **extra)

    assert undeclared.depth(queue) == LETTERS


def test_queues_without_limit_can_be_browsed_forever(undeclared):
    # RabbitMQ 3 has no default
    queue = declare(undeclared)
    assert [look(undeclared, queue) for _ in range(25)] == [LETTERS] * 25
