from __future__ import annotations

import dataclasses
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.producers.rabbitmq.bundle import (
    VERSION,
    BundleError,
    Header,
    Held,
    pack,
    read_header,
    unpack,
)

SHORT = st.binary(max_size=255).map(lambda text: bytes([len(text)]) + text)
MESSAGES = st.builds(
    Held,
    message_id=st.text(min_size=1, max_size=60),
    attempt=st.integers(1, 2**31),
    redelivered=st.booleans(),
    route=st.tuples(SHORT, SHORT).map(b"".join),
    properties=st.binary(max_size=1000),
    body=st.binary(max_size=5000),
)


def header(count: int) -> Header:
    return Header(
        bundle="b1", generation="g1", queue="flights", count=count, until=9.5, owner={"run_id": "r"}
    )


@given(st.lists(MESSAGES, max_size=20))
def test_bundle_round_trips(messages):
    read, unpacked = unpack(pack(header(len(messages)), messages))

    assert unpacked == messages
    assert read == header(len(messages))


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.data())
def test_truncated_bundle_is_error(messages, data):
    body = pack(header(len(messages)), messages)
    cut = data.draw(st.integers(0, len(body) - 1))

    with pytest.raises(BundleError):
        unpack(body[:cut])


@given(st.binary(max_size=300))
def test_non_bundle_is_error(data):
    with pytest.raises(BundleError):
        unpack(data)


def test_newer_bundle_version_is_refused():
    body = pack(header(0), [])

    with pytest.raises(BundleError, match="format version 9, and this release reads 3"):
        read_header(body[:4] + b"\x09" + body[5:])


@pytest.mark.parametrize(
    "head", [b'{"bundle":"b","surprise":1}', b"[" * 500_000], ids=["unknown field", "nested"]
)
def test_damaged_header_is_refused(head):
    with pytest.raises(BundleError, match="damaged"):
        unpack(b"AFBW" + struct.pack(">BI", VERSION, len(head)) + head)


@pytest.mark.parametrize(
    "head",
    [
        {"bundle": 5},
        {"generation": ["g"]},
        {"count": "3"},
        {"count": -1},
        {"owner": None},
        {"until": "tomorrow"},
        {"until": float("inf")},
    ],
)
def test_malformed_header_is_refused(head):
    text = json.dumps({**dataclasses.asdict(header(0)), **head}).encode()

    with pytest.raises(BundleError, match=f"no proper {next(iter(head))}"):
        unpack(b"AFBW" + struct.pack(">BI", VERSION, len(text)) + text)


@pytest.mark.parametrize("route", [b"", b"\x05abc", b"\x00", b"\x00\x02a", b"\x00\x00more"])
def test_message_without_route_is_refused(route):
    with pytest.raises(BundleError, match="lacks its id, attempt or route"):
        unpack(pack(header(1), [Held("id", 1, False, route, b"", b"")]))
