from __future__ import annotations

import itertools

from airflow_broadway.producers.rabbitmq.broker.names import LADDER, QueueNames, rung


def test_names_of_queues_stay_within_the_limit() -> None:
    queues = QueueNames("ż" * 120)

    for name in (queues.lease("g"), queues.returns, queues.dead, queues.delay(21600)):
        assert len(name.encode()) <= 255
    assert QueueNames("a").lease("g") != QueueNames("b").lease("g")


def test_a_delay_may_come_a_tenth_early_and_no_more() -> None:
    for shorter, longer in itertools.pairwise(LADDER):
        assert rung(shorter / 0.9 - 1e-6) == shorter
        assert rung(shorter / 0.9 + 1e-6) == longer
    assert [rung(delay) for delay in (0, 0.5, LADDER[-1] * 100)] == [None, 1, LADDER[-1]]


def test_a_name_of_255_bytes_stays_and_a_longer_one_is_hashed() -> None:
    room = 255 - len("broadway.returns.")
    assert QueueNames("q" * room).returns == "broadway.returns." + "q" * room
    hashed = QueueNames("q" * (room + 1)).returns
    assert len(hashed) == len("broadway.returns.") + 32
    assert "q" not in hashed.removeprefix("broadway.returns.")
    # Bytes, not characters
    assert "ż" in QueueNames("ż" * (room // 2)).returns
    assert "ż" not in QueueNames("ż" * (room // 2 + 1)).returns
