from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.properties import (
    decode,
    decode_entry,
    encode,
    json_value,
    staged_delivery,
    staged_text,
)
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.marks import (
    MARK,
    Mark,
    mark_of,
    publication_key,
    republished,
    restored,
)

SHORT = st.text(max_size=20)
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
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


@given(PROPERTIES)
def test_properties_round_trip(properties):
    assert decode(encode(**properties)) == properties


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"d" + struct.pack(">d", 1.5), 1.5),
        (b"d" + struct.pack(">d", float("inf")), float("inf")),
        (b"f" + struct.pack(">f", -0.25), -0.25),
        (b"D" + struct.pack(">Bi", 2, -314), Decimal("-3.14")),
        (b"b\xff", -1),
        (b"B\xff", 255),
        (b"s\xff\xff", -1),
        (b"u\xff\xff", 65_535),
        (b"i\xff\xff\xff\xff", 2**32 - 1),
        (b"S\x00\x00\x00\x01\xff", b"\xff"),
    ],
)
def test_value_is_decoded_by_type(raw, value):
    # pika writes none of these, and makes integers of floats
    assert decode_entry(raw) == value


@given(st.binary(max_size=200))
def test_hostile_bytes_decode_or_fail_cleanly(data):
    try:
        decode(data)
    except ProducerError:
        pass


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draws properties with damaged bytes."""
    headers = draw(st.dictionaries(SHORT, VALUES, max_size=4))
    headers[MARK] = {"id": "id-1", "giver": "g1", "attempt": draw(VALUES)}
    data = bytearray(encode(headers=headers, timestamp=5, message_id="m"))
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(
            st.integers(0, 255) | st.sampled_from(b"TDSFAltx")
        )
    return bytes(data[: draw(st.integers(len(data) // 2, len(data)))])


@settings(max_examples=200, deadline=None)
@given(damaged())
def test_damaged_properties_decode_or_fail_cleanly(data):
    try:
        json.dumps(json_value(decode(data)))
        readable = True
    except ProducerError:
        readable = False
    mark_of(data)
    publication_key(data)
    message = Held("id-1", 1, False, b"\x00\x01q", data, b"body")
    publication = republished(message, Mark("id-1", "g1", 3), limit=2**20)
    try:
        decode(publication)
    except ProducerError:
        assert not readable  # damage deep within a header is kept unchanged
    restored(b"\x00\x01q", publication, trusted=True)


@pytest.mark.parametrize("seconds", [253_402_300_800, 1_700_000_000_000, 1_700_000_000 * 10**9])
def test_timestamp_beyond_python_dates_is_kept(seconds):
    table = b"\x04sentT" + struct.pack(">Q", seconds)
    data = b"\x20\x00" + struct.pack(">I", len(table)) + table

    assert decode(data) == {"headers": {"sent": seconds}}
    assert json_value(decode(data)) == {"headers": {"sent": seconds}}


def test_deeply_nested_tables_are_refused():
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = {"n": nested}

    with pytest.raises(ProducerError, match="nested"):
        decode(encode(headers=nested))


@given(st.binary(max_size=300), st.binary(max_size=300), st.booleans())
def test_staging_keeps_route_and_properties_byte_for_byte(route, data, redelivered):
    assert staged_delivery(staged_text(route, data, redelivered)) == (route, data, redelivered)


def test_metadata_values_are_json():
    value = {"at": datetime(2026, 1, 1, tzinfo=UTC), "raw": b"\xff", "nan": float("nan")}

    assert json_value([value]) == [
        {"at": "2026-01-01T00:00:00+00:00", "raw": "\\xff", "nan": "nan"}
    ]
