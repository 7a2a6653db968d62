from __future__ import annotations

import logging

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.receive.intake import Buffer, Quarantined


def test_first_ten_dead_letters_are_logged_and_all_counted(caplog):
    caplog.set_level(logging.ERROR)
    buffer = Buffer()
    for number in range(12):
        buffer.add([Quarantined(f"m{number}", "bundle" if number % 2 else "oversized", "why")])
    assert [text.split()[1] for text in caplog.messages] == [f"m{number}" for number in range(10)]
    assert buffer.set_aside == {"oversized": 6, "bundle": 6}


def messages(*numbers: int) -> list[Held]:
    return [Held(f"m{n}", 1, False, b"\0\0", b"\0\0", b"") for n in numbers]


def test_in_flight_stays_within_demand():
    buffer = Buffer()
    assert buffer.claim(10) == 0

    buffer.demand(5)
    assert [buffer.claim(3), buffer.claim(3), buffer.claim(3)] == [3, 2, 0]


def test_unused_claim_is_returned():
    buffer = Buffer()
    buffer.demand(5)
    buffer.claim(5)

    full = [buffer.full]
    buffer.unclaim(2)
    full.append(buffer.full)

    assert buffer.claim(9) == 2
    assert [*full, buffer.full] == [True, False, True]


def test_handed_out_messages_free_no_room_until_next_demand():
    buffer = Buffer()
    buffer.demand(3)
    buffer.claim(3)
    buffer.add([messages(1, 2, 3)])

    assert [message.message_id for message in buffer.take(2)] == ["m1", "m2"]
    assert buffer.claim(5) == 0
    buffer.demand(3)
    assert buffer.claim(5) == 2
    assert [message.message_id for message in buffer.take(2)] == ["m3"]


def test_lost_connection_keeps_secured_messages():
    buffer = Buffer()
    buffer.demand(5)
    buffer.claim(5)
    buffer.add([messages(1, 2)])

    buffer.forget_unsecured()

    assert buffer.under_way == 2
    assert buffer.claim(5) == 3


def test_end_hands_out_secured_messages_only():
    buffer = Buffer()
    buffer.demand(5)
    buffer.claim(5)
    buffer.add([messages(1), messages(2, 3)])

    assert [message.message_id for message in buffer.take_all()] == ["m1", "m2", "m3"]
    assert buffer.under_way == 0
    assert buffer.empty


def test_first_error_of_connection_is_kept():
    buffer = Buffer()
    first, second = ProducerUnavailable("first"), ProducerUnavailable("second")
    buffer.fail(first)
    buffer.fail(second)
    assert buffer.error is first

    buffer.begin()
    assert buffer.error is None
