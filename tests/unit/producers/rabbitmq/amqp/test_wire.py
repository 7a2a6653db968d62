from __future__ import annotations

import struct
from typing import Any

import pika
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import frame, spec

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.properties import join_fields
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered, FrameReader, connection_class


def frames(
    *, channel: int, tag: int, redelivered: bool, route: tuple[str, str], body: bytes, size: int
) -> bytes:
    """Returns the frames of a delivery."""
    deliver = spec.Basic.Deliver("ctag", tag, redelivered, *route)
    properties = pika.BasicProperties(content_type="text/plain", headers={"n": tag})
    parts = [frame.Method(channel, deliver).marshal()]
    parts.append(frame.Header(channel, len(body), properties).marshal())
    parts += [
        frame.Body(channel, body[start : start + size]).marshal()
        for start in range(0, len(body), size)
    ]
    return b"".join(parts)


class Reader:
    """Collects parsed frames, without a network."""

    def __init__(self) -> None:
        self.deliveries: list[Delivered] = []
        self.others: list[Any] = []
        self.returned: list[tuple[int, str, bytes]] = []
        self._frames = FrameReader(self.others.append)
        self._frames.on_delivery(1, self.deliveries.append)
        self._frames.on_return(2, lambda *returned: self.returned.append(returned))

    def feed(self, data: bytes) -> None:
        self._frames.feed(data)


DELIVERIES = st.lists(
    st.tuples(st.booleans(), st.text(max_size=10), st.text(max_size=10), st.binary(max_size=400)),
    max_size=6,
)


@settings(deadline=None)
@given(DELIVERIES, st.lists(st.integers(1, 300), max_size=30), st.integers(1, 100))
def test_deliveries_are_parsed_from_any_chunks(deliveries, portions, size):
    data = b""
    for tag, (redelivered, exchange, key, body) in enumerate(deliveries, 1):
        data += frames(
            channel=1, tag=tag, redelivered=redelivered, route=(exchange, key), body=body, size=size
        )
        # Between them other frames, which pika handles.
        data += frame.Heartbeat().marshal()
        data += frame.Method(1, spec.Basic.Ack(tag, multiple=True)).marshal()
        data += frames(
            channel=2, tag=tag, redelivered=False, route=("", ""), body=b"other", size=size
        )
    reader = Reader()
    for portion in portions:
        reader.feed(data[:portion]) if data[:portion] else None
        data = data[portion:]
    if data:
        reader.feed(data)

    assert len(reader.deliveries) == len(deliveries)
    for tag, (delivered, (redelivered, exchange, key, body)) in enumerate(
        zip(reader.deliveries, deliveries, strict=True), 1
    ):
        assert (delivered.tag, delivered.redelivered, delivered.body) == (tag, redelivered, body)
        raw = b"".join(bytes([len(t.encode())]) + t.encode() for t in (exchange, key))
        assert delivered.route == raw
        theirs = pika.BasicProperties()
        theirs.decode(delivered.properties)
        assert (theirs.content_type, theirs.headers) == ("text/plain", {"n": tag})
    acks = [f for f in reader.others if isinstance(f, frame.Method)]
    assert [f.method.delivery_tag for f in acks if f.channel_number == 1] == list(
        range(1, len(deliveries) + 1)
    )
    assert sum(isinstance(f, frame.Heartbeat) for f in reader.others) == len(deliveries)


@settings(deadline=None)
@given(st.binary(max_size=50), st.integers(1, 60), st.integers(1, 20))
def test_return_with_properties_unreadable_by_pika_is_parsed(body, portion, size):
    infinite = b"\x01nd" + struct.pack(">d", float("inf"))
    properties = join_fields(
        {"headers": struct.pack(">I", len(infinite)) + infinite, "message_id": b"\x02id"}
    )
    method = spec.Basic.Return(312, "NO_ROUTE", "exchange", "key")
    data = frame.Method(2, method).marshal()
    head = struct.pack(">HHQ", 60, 0, len(body)) + properties
    data += struct.pack(">BHI", 2, 2, len(head)) + head + b"\xce"
    for start in range(0, len(body), size):
        data += frame.Body(2, body[start : start + size]).marshal()
    data += frame.Method(2, spec.Basic.Ack(1)).marshal()
    reader = Reader()
    for start in range(0, len(data), portion):
        reader.feed(data[start : start + portion])

    assert reader.returned == [(312, "NO_ROUTE", properties)]
    assert len(reader.others) == 1


@pytest.mark.parametrize("left", ["_on_data_available", "_process_frame"])
def test_pika_without_overridden_methods_is_refused(monkeypatch, left):
    monkeypatch.setattr("pika.SelectConnection", type("Other", (), {left: None}))
    with pytest.raises(ProducerError, match=r"pika .* is not supported: install a release from 1"):
        connection_class()
