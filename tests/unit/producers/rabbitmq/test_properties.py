from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.properties import (
    MARK,
    ORIGINAL,
    Mark,
    decode,
    dump,
    encode,
    load,
    mark_of,
    plain,
    republished,
)

SHORT = st.text(max_size=20)
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=50)
    | st.binary(max_size=50).map(bytearray).map(bytes)
    | st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1)).map(  # noqa: DTZ001
        lambda at: at.replace(microsecond=0, tzinfo=UTC)
    )
    | st.integers(-(2**31), 2**31 - 1).map(lambda number: Decimal(number).scaleb(-2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=8,
)
PROPERTIES = st.fixed_dictionaries(
    {},
    optional={
        "content_type": SHORT,
        "headers": st.dictionaries(SHORT, VALUES, max_size=4),
        "delivery_mode": st.integers(0, 255),
        "priority": st.integers(0, 255),
        "correlation_id": SHORT,
        "expiration": SHORT,
        "message_id": SHORT,
        "timestamp": st.integers(0, 2**63),
        "user_id": SHORT,
    },
)


def shapes(value: Any) -> str:
    """The types in a value: pika makes integers of a table's floats."""
    if isinstance(value, dict):
        return " ".join(map(shapes, value.values()))
    if isinstance(value, list):
        return " ".join(map(shapes, value))
    return type(value).__name__


MARKED = Mark("id-1", "g1", 3)


@given(PROPERTIES)
def test_properties_are_read_as_they_were_written(properties: dict[str, Any]) -> None:
    assert decode(encode(properties)) == properties


@given(PROPERTIES.filter(lambda given_: "float" not in shapes(given_)))
def test_pika_reads_the_same(properties: dict[str, Any]) -> None:
    from pika import BasicProperties

    theirs = BasicProperties()
    theirs.decode(encode(properties))

    assert {k: v for k, v in vars(theirs).items() if v is not None} == properties


@given(st.binary(max_size=200))
def test_hostile_bytes_are_an_error_or_properties_and_nothing_else(data: bytes) -> None:
    try:
        decode(data)
    except ProducerError:
        pass
    assert mark_of(b"\x20\x00" + data + MARK.encode()) is None
    decode(republished(data, MARKED))


def test_tables_nested_beyond_reason_are_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = {"n": nested}

    with pytest.raises(ProducerError, match="nested"):
        decode(encode({"headers": nested}))


def test_what_is_published_again_carries_its_mark() -> None:
    made = republished(encode({"headers": {"colour": "red"}, "message_id": "theirs"}), MARKED)

    assert mark_of(made) == MARKED
    assert decode(made)["headers"]["colour"] == "red"
    assert decode(made)["message_id"] == "theirs"
    assert decode(made)["delivery_mode"] == 2


def test_what_would_do_harm_moves_to_a_header_of_its_own() -> None:
    death = [{"queue": "flights", "reason": "rejected", "count": 1}]
    headers = {"x-death": death, "CC": ["copies"], "BCC": ["more"], "x-first-death-queue": "q"}
    given_ = {"headers": headers, "user_id": "somebody", "expiration": "60000"}

    made = decode(republished(encode(given_), MARKED))

    assert set(made["headers"]) == {MARK, ORIGINAL}
    assert made["headers"][ORIGINAL] == {
        "x-death": death,
        "CC": ["copies"],
        "BCC": ["more"],
        "user_id": "somebody",
        "expiration": "60000",
    }
    assert "user_id" not in made
    assert "expiration" not in made


def test_our_own_ladder_leaves_no_trace_in_the_original() -> None:
    death = [{"queue": "broadway.delay.60.flights", "reason": "expired", "count": 1}]
    once = republished(encode({"headers": {"x-death": death}}), MARKED)

    assert ORIGINAL not in decode(once)["headers"]


def test_publishing_again_and_again_does_not_grow() -> None:
    made = republished(encode({"user_id": "somebody"}), MARKED)
    size = len(made)
    for attempt in range(4, 9):
        made = republished(made, Mark("id-1", "g2", attempt))

    assert len(made) == size
    assert decode(made)["headers"][ORIGINAL] == {"user_id": "somebody"}


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
def test_a_mark_that_is_none_of_ours_is_ignored(mark: Any) -> None:
    assert mark_of(encode({"headers": {MARK: mark}})) is None


@given(st.binary(max_size=300), st.binary(max_size=300), st.booleans())
def test_staging_keeps_route_and_properties_byte_for_byte(
    route: bytes, data: bytes, redelivered: bool
) -> None:
    assert load(dump(route, data, redelivered)) == (route, data, redelivered)


def test_metadata_values_are_json() -> None:
    value = {"at": datetime(2026, 1, 1, tzinfo=UTC), "raw": b"\xff", "nan": float("nan")}

    assert plain([value]) == [{"at": "2026-01-01T00:00:00+00:00", "raw": "\\xff", "nan": "nan"}]
