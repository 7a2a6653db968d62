from __future__ import annotations

import logging

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.receive.intake import Buffer, Quarantined


def test_the_first_ten_that_are_set_aside_are_logged_and_all_are_counted(caplog):
    caplog.set_level(logging.ERROR)
    buffer = Buffer()
    for number in range(12):
        buffer.add([Quarantined(f"m{number}", "bundle" if number % 2 else "oversized", "why")])
    assert [text.split()[1] for text in caplog.messages] == [f"m{number}" for number in range(10)]
    assert buffer.set_aside == {"oversized": 6, "bundle": 6}


def held(*numbers: int) -> list[Held]:
    return [Held(f"m{n}", 1, False, b"\0\0", b"\0\0", b"") for n in numbers]


def test_no_more_is_under_way_than_is_demanded():
    buffer = Buffer()
    assert buffer.claim(10) == 0

    buffer.demand(5)
    assert [buffer.claim(3), buffer.claim(3), buffer.claim(3)] == [3, 2, 0]


def test_what_was_claimed_and_not_taken_may_be_claimed_again():
    buffer = Buffer()
    buffer.demand(5)
    buffer.claim(5)

    full = [buffer.full]
    buffer.unclaim(2)
    full.append(buffer.full)

    assert buffer.claim(9) == 2
    assert [*full, buffer.full] == [True, False, True]


def test_what_is_handed_out_makes_no_room_before_the_next_demand():
    buffer = Buffer()
    buffer.demand(3)
    buffer.claim(3)
    buffer.add([held(1, 2, 3)])

    assert [each.message_id for each in buffer.take(2)] == ["m1", "m2"]
    assert buffer.claim(5) == 0
    buffer.demand(3)
    assert buffer.claim(5) == 2
    assert [each.message_id for each in buffer.take(2)] == ["m3"]


def test_a_lost_connection_leaves_under_way_what_is_secured():
    buffer = Buffer()
    buffer.demand(5)
    buffer.claim(5)
    buffer.add([held(1, 2)])

    buffer.forget_unsecured()

    assert buffer.under_way == 2
    assert buffer.claim(5) == 3


def test_the_end_hands_out_what_is_secured_and_nothing_else():
    buffer = Buffer()
    buffer.demand(5)
    buffer.claim(5)
    buffer.add([held(1), held(2, 3)])

    assert [each.message_id for each in buffer.take_all()] == ["m1", "m2", "m3"]
    assert buffer.under_way == 0
    assert buffer.empty


def test_the_first_error_is_the_one_that_ended_the_connection():
    buffer = Buffer()
    first, second = ProducerUnavailable("first"), ProducerUnavailable("second")
    buffer.fail(first)
    buffer.fail(second)
    assert buffer.error is first

    buffer.begin()
    assert buffer.error is None
