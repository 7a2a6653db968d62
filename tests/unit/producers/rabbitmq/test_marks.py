from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.producers.rabbitmq.amqp.properties import (
    decode,
    encode,
    entries_of,
    fields_of,
    join_entries,
    join_fields,
)
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.marks import (
    MARK,
    MAX_PROPERTIES,
    ORIGINAL,
    Mark,
    TooLarge,
    dead_lettered,
    mark_of,
    republished,
    restored,
)
from tests.unit.producers.rabbitmq.amqp.test_properties import PROPERTIES

MARKED = Mark("id-1", "g1", 3, "turn")
ROUTE = b"\x04shop\x11orders.eu.created"
LADDER = {"queue": "broadway.delay.60.flights", "reason": "expired", "count": 1}


def message(properties: bytes | dict[str, Any], body: bytes = b"body") -> Held:
    raw = properties if isinstance(properties, bytes) else encode(**properties)
    return Held("id-1", 3, True, ROUTE, raw, body)


def dead(sent: Held, reason: str, *, limit: int = MAX_PROPERTIES) -> bytes:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return dead_lettered(
        sent, MARKED, reason=reason, stage="process", source="q", now=now, limit=limit
    )


def with_headers(*entries: tuple[bytes, bytes]) -> bytes:
    return join_fields({"headers": join_entries(entries)})


@given(PROPERTIES)
def test_fields_and_entries_round_trip_byte_for_byte(properties):
    raw = encode(**properties)
    fields = fields_of(raw)

    assert join_fields(fields) == raw
    if "headers" in fields:
        assert join_entries(entries_of(fields["headers"])) == fields["headers"]


def test_republished_message_carries_mark():
    sent = message({"headers": {"colour": "red"}, "message_id": "foreign"})
    publication = republished(sent, MARKED)

    mark = mark_of(publication)
    assert mark is not None
    assert mark._replace(digest="") == MARKED
    assert mark.belongs_to(message(publication))
    assert decode(publication)["headers"]["colour"] == "red"
    assert decode(publication)["message_id"] == "foreign"
    assert decode(publication)["delivery_mode"] == 2


@given(PROPERTIES)
def test_republished_message_is_received_unchanged(properties):
    sent = message(properties)
    publication = republished(sent, MARKED)

    route, properties_back = restored(b"\x00\x06orders", publication, trusted=True)

    assert route == ROUTE
    expected = decode(sent.properties)
    if not expected.get("headers"):  # none and an empty table are the same
        expected.pop("headers", None)
    expected["headers"] = {
        k: v for k, v in expected.get("headers", {}).items() if not k.startswith(MARK)
    }
    if not expected["headers"]:
        del expected["headers"]
    assert decode(properties_back) == expected


@given(st.binary(max_size=200))
def test_unreadable_properties_are_received_unchanged(data):
    sent = message(b"\x20\x00\xff\xff\xff\xff" + data)

    route, properties_back = restored(b"\x00\x01q", republished(sent, MARKED), trusted=True)

    assert (route, properties_back) == (ROUTE, sent.properties)


def test_unchanged_headers_keep_bytes():
    # 10,000 small integers of two bytes; re-encoded, they would take nine
    small = b"A" + struct.pack(">I", 20_000) + b"b\x07" * 10_000
    sent = message(with_headers((b"numbers", small), (b"odd", b"S\x00\x00\x00\x02\xff\xfe")))

    publication = republished(sent, MARKED)

    assert entries_of(fields_of(publication)["headers"])[:2] == entries_of(
        fields_of(sent.properties)["headers"]
    )


def test_harmful_properties_move_to_own_header():
    death = [{"queue": "flights", "reason": "rejected", "count": 1}]
    headers = {"x-death": death, "CC": ["copies"], "BCC": ["more"], "x-first-death-queue": "q"}
    properties = {"headers": headers, "user_id": "alice", "expiration": "60000"}

    publication = decode(republished(message(properties), MARKED))

    assert set(publication["headers"]) == {MARK, ORIGINAL}
    assert publication["headers"][ORIGINAL] == {
        **headers,
        "exchange": "shop",
        "routing_key": "orders.eu.created",
        "user_id": "alice",
        "expiration": "60000",
        "delivery_mode": None,
    }
    assert "user_id" not in publication
    assert "expiration" not in publication


def test_own_deaths_are_removed_and_others_kept():
    foreign = {"queue": "orders", "reason": "rejected", "count": 1}
    publication = decode(republished(message({"headers": {"x-death": [foreign]}}), MARKED))
    later = {"queue": "parked", "reason": "expired", "count": 1}
    publication["headers"] |= {
        "x-death": [LADDER, later],
        "x-first-death-queue": "broadway.delay.60.q",
    }

    _, properties_back = restored(b"\x00\x01q", encode(**publication), trusted=True)

    assert decode(properties_back)["headers"] == {"x-death": [later, foreign]}


def test_user_id_is_restored_only_if_moved_by_us():
    publication = republished(message({"user_id": "alice"}), MARKED)

    assert decode(restored(ROUTE, publication, trusted=True)[1])["user_id"] == "alice"
    assert "user_id" not in decode(restored(ROUTE, publication, trusted=False)[1])


def test_repeated_republishing_does_not_grow():
    sent = message({"user_id": "alice", "headers": {"x-death": [LADDER]}})
    publication = republished(sent, MARKED)
    for attempt in range(4, 9):
        route, properties = restored(ROUTE, publication, trusted=True)
        again = Held("id-1", 3, True, route, properties, b"body")
        publication, before = republished(again, Mark("id-1", "g2", attempt, "turn")), publication

        assert len(publication) <= len(before)


def test_mark_is_bound_to_message():
    publication = republished(message({"correlation_id": "1", "headers": {"a": 1}}), MARKED)
    mark = mark_of(publication)
    assert mark is not None
    answer = encode(correlation_id="2", headers=decode(publication)["headers"])

    assert mark.belongs_to(message(publication))
    assert not mark.belongs_to(message(publication, b"another body"))
    assert not mark.belongs_to(message(answer))


@pytest.mark.parametrize(
    "mark",
    [
        None,
        7,
        "text",
        {},
        {"id": "x", "giver": "g"},
        {"id": "x", "giver": "g", "attempt": "many"},
        {"id": "x", "giver": "g", "attempt": 2**62},
        {"id": "x" * 5000, "giver": "g", "attempt": 1},
    ],
)
def test_foreign_mark_is_ignored(mark):
    assert mark_of(encode(headers={MARK: mark})) is None


@given(st.binary(max_size=200))
def test_hostile_mark_parses_or_fails_cleanly(data):
    assert mark_of(b"\x20\x00" + data + MARK.encode()) is None
    decode(republished(message(data), MARKED))


def test_dead_letter_has_reason_and_fresh_attempts():
    publication = dead(message({"headers": {"a": 1}}), "Bob \ud83d")

    headers = decode(publication)["headers"]
    assert headers["x-broadway-reason"] == "Bob \\ud83d"
    assert (headers["x-broadway-stage"], headers["x-broadway-attempt"]) == ("process", 3)
    mark = mark_of(publication)
    assert mark is not None
    assert (mark.message_id, mark.attempt) == ("id-1", 1)
    assert decode(restored(ROUTE, publication, trusted=True)[1])["headers"] == {"a": 1}
    long = dead(message({}), "é" * 5_000)
    assert len(decode(long)["headers"]["x-broadway-reason"].encode()) <= 2_048


def test_message_with_little_room_carries_less_metadata():
    def headers_of(size: int) -> dict[str, Any]:
        sent = message({"headers": {"large": b"x" * size}, "delivery_mode": 2})
        publication = dead(sent, "y" * 500, limit=10_000)
        assert len(publication) <= 10_000
        return {k: v for k, v in decode(publication)["headers"].items() if k != "large"}

    assert len(headers_of(9_000)["x-broadway-reason"]) == 500
    assert len(headers_of(9_400)["x-broadway-reason"].encode()) == 64
    assert headers_of(9_700)[MARK]["id"] == "id-1"
    assert headers_of(9_970) == {}


def test_retry_needs_room_for_mark():
    sent = message({"headers": {"large": b"x" * 9_970}})

    with pytest.raises(TooLarge, match="one frame"):
        republished(sent, MARKED, limit=10_000)


def test_route_is_decoded_as_text():
    assert split_route(ROUTE) == ("shop", "orders.eu.created")
