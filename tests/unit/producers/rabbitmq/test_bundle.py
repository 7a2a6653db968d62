from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.producers.rabbitmq.bundle import (
    BundleError,
    Header,
    Held,
    pack,
    read_header,
    unpack,
)

HELD = st.builds(
    Held,
    message_id=st.text(max_size=60),
    attempt=st.integers(1, 2**31),
    crashes=st.integers(0, 255),
    redelivered=st.booleans(),
    route=st.binary(max_size=512),
    properties=st.binary(max_size=1000),
    body=st.binary(max_size=5000),
)


def header(count: int) -> Header:
    return Header(bundle="b1", generation="g1", queue="flights", count=count, owner={"run_id": "r"})


@given(st.lists(HELD, max_size=20))
def test_a_bundle_is_read_as_it_was_written(messages: list[Held]) -> None:
    read, found = unpack(pack(header(len(messages)), messages))

    assert found == messages
    assert read == header(len(messages))


@given(st.lists(HELD, min_size=1, max_size=5), st.data())
def test_a_bundle_that_is_cut_off_is_an_error_and_never_fewer_messages(
    messages: list[Held], data: st.DataObject
) -> None:
    body = pack(header(len(messages)), messages)
    cut = data.draw(st.integers(0, len(body) - 1))

    with pytest.raises(BundleError):
        unpack(body[:cut])


@given(st.binary(max_size=300))
def test_what_is_no_bundle_is_an_error(data: bytes) -> None:
    with pytest.raises(BundleError):
        unpack(data)


def test_a_newer_version_is_refused_by_its_number() -> None:
    body = pack(header(0), [])

    with pytest.raises(BundleError, match="format version 9, and this release reads 1"):
        read_header(body[:4] + b"\x09" + body[5:])


def test_a_header_of_unknown_fields_is_refused() -> None:
    head = b'{"bundle":"b","surprise":1}'

    with pytest.raises(BundleError, match="damaged"):
        unpack(b"AFBW" + struct.pack(">BI", 1, len(head)) + head)
