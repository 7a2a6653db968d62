from __future__ import annotations

import itertools

import pytest

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.broker.holding_queues import LADDER, QueueNames, rung


def test_queue_names_stay_within_limit():
    queues = QueueNames("ż" * 120)

    claim, key = f"{queues.held(999)}.claim", queues.key("g" * 99)
    for name in (claim, key, queues.dead, queues.delay(21600)):
        assert len(name.encode()) <= 255
    assert QueueNames("a").key("g") != QueueNames("b").key("g")


@pytest.mark.parametrize("source", ["orders", "orders.1", "ż" * 120])
def test_holding_queue_is_recognized_by_name(source):
    queues = QueueNames(source)

    assert queues.own_held(queues.held(7)) == queues.held(7)
    for name in ("", None, source, queues.dead, queues.held(7) + "x", QueueNames("b").held(7)):
        with pytest.raises(ProducerError, match="is no holding queue"):
            queues.own_held(name)


def test_delay_is_at_most_a_tenth_early():
    for shorter, longer in itertools.pairwise(LADDER):
        assert rung(shorter / 0.9 - 1e-6) == shorter
        assert rung(shorter / 0.9 + 1e-6) == longer
    assert [rung(delay) for delay in (0, 0.5, LADDER[-1] * 100)] == [None, 1, LADDER[-1]]


def test_long_queue_name_is_hashed():
    room = 255 - len("broadway.dead.") - len(".claim")
    assert QueueNames("q" * room).dead == "broadway.dead." + "q" * room
    hashed = QueueNames("q" * (room + 1)).dead
    assert len(hashed) == len("broadway.dead.") + 32
    assert "q" not in hashed.removeprefix("broadway.dead.")
    # Bytes, not characters
    assert "ż" in QueueNames("ż" * (room // 2)).dead
    assert "ż" not in QueueNames("ż" * (room // 2 + 1)).dead
