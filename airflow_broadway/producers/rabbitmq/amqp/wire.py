"""Parses deliveries from the socket's bytes, and passes all other frames to pika.

pika creates five objects per delivery and decodes all its properties.  That is more work than the
rest of a run's work on a message, and headers that pika cannot decode close the connection.  Here a
delivery is one tuple, with its properties as raw bytes.  They are decoded on demand (module
``properties``), so hostile headers fail only their own message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core.errors import ProducerError

if TYPE_CHECKING:
    from pika import SelectConnection
    from pika.connection import Parameters


class Delivered(NamedTuple):
    """A delivery.

    :param tag: Its delivery tag, on its channel.
    :param redelivered: Whether the broker has delivered it before.
    :param route: Its exchange and routing key, as short strings.
    :param properties: Its property flags and property list, as in the content header.
    """

    tag: int
    redelivered: bool
    route: bytes
    properties: bytes
    body: bytes


def split_route(route: bytes) -> tuple[str, str]:
    """Returns the exchange and routing key of a delivery."""
    first = 1 + route[0] if route else 0
    exchange, key = route[1:first], route[first + 1 :]
    return exchange.decode("utf-8", "backslashreplace"), key.decode("utf-8", "backslashreplace")


def join_route(exchange: str, key: str) -> bytes:
    """Returns the route that :func:`split_route` splits; longer parts than AMQP allows are cut."""
    parts = (text.encode("utf-8", "replace")[:255] for text in (exchange, key))
    return b"".join(bytes([len(raw)]) + raw for raw in parts)


#: type, channel, size, class id, method id
_METHOD = struct.Struct(">BHIHH")
#: delivery tag, redelivered
_TAG = struct.Struct(">QB")
#: type, channel, size, class id, weight, body size
_HEADER = struct.Struct(">BHIHHQ")
_FRAME = struct.Struct(">BHI")

#: The class ``basic``, and its methods with content from the broker.
_BASIC = 60
_RETURN, _DELIVER, _GET_OK = 50, 60, 71

#: Handles a message: the data, the bounds of its method frame, its properties and its body.
_Handler = Callable[[bytes, int, int, bytes, bytes], None]


def _parse_content(data: bytes, at: int) -> tuple[bytes, bytes, int] | None:
    """Parses the content that begins with the header frame at ``at``: properties, body, end.

    :returns: ``None`` if it is incomplete.
    """
    end = len(data)
    if at + 21 > end:
        return None
    _, _, size, _, _, left = _HEADER.unpack_from(data, at)
    after = at + size + 8
    properties = data[at + 19 : after - 1]
    parts = []
    while left:  # a body has one frame or several
        if after + 7 > end:
            return None
        size = _FRAME.unpack_from(data, after)[2]
        start, after = after + 7, after + size + 8
        if after > end:
            return None
        parts.append(data[start : after - 1])
        left -= size
    if after > end:
        return None
    return properties, parts[0] if len(parts) == 1 else b"".join(parts), after


class FrameReader:
    """Parses the data of one connection: messages itself, all other frames with pika.

    :param process_frame: Called with each frame for pika.
    """

    def __init__(self, process_frame: Callable[[Any], None]) -> None:
        from pika.frame import decode_frame

        #: Called after each chunk of data.
        self.after_data: Callable[[], None] | None = None
        self._handlers: dict[tuple[int, int], _Handler] = {}
        self._decode = decode_frame
        self._process_frame = process_frame
        self._parts: list[bytes] = []
        self._missing = 0

    def on_delivery(self, channel: int, function: Callable[[Delivered], None]) -> None:
        """Registers ``function``, which is called with each delivery on a channel."""

        def handle(data: bytes, at: int, end: int, properties: bytes, body: bytes) -> None:
            offset = at + 12 + data[at + 11]  # after the consumer's tag
            tag, redelivered = _TAG.unpack_from(data, offset)
            route = data[offset + 9 : end - 1]
            function(Delivered(tag, redelivered != 0, route, properties, body))

        self._handlers[channel, _DELIVER] = handle

    def on_get(self, channel: int, function: Callable[[Delivered], None]) -> None:
        """Registers ``function``, which is called with each ``basic.get`` message on a channel."""

        def handle(data: bytes, at: int, end: int, properties: bytes, body: bytes) -> None:
            tag, redelivered = _TAG.unpack_from(data, at + 11)
            route = data[at + 20 : end - 5]  # the message count follows
            function(Delivered(tag, redelivered != 0, route, properties, body))

        self._handlers[channel, _GET_OK] = handle

    def on_return(self, channel: int, function: Callable[[int, str, bytes], None]) -> None:
        """Registers ``function``, which is called with code, text and properties of each return."""

        def handle(data: bytes, at: int, end: int, properties: bytes, body: bytes) -> None:
            code = int.from_bytes(data[at + 11 : at + 13], "big")
            text = data[at + 14 : at + 14 + data[at + 13]].decode("utf-8", "replace")
            function(code, text, properties)

        self._handlers[channel, _RETURN] = handle

    def feed(self, data_in: bytes) -> None:
        """Parses a chunk of data, after the incomplete rest of the previous one."""
        self._parts.append(data_in)
        self._missing -= len(data_in)
        if self._missing > 0:  # a large body: joined only when it is complete
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        at = self._parse(data)
        rest = data[at:] if at else data
        self._parts = [rest] if rest else []
        self._missing = _count_missing(rest)
        if self.after_data is not None:
            self.after_data()

    def _parse(self, data: bytes) -> int:
        """Parses all complete frames; returns the offset after the last one."""
        handlers, unpack = self._handlers, _METHOD.unpack_from
        at, end = 0, len(data)
        while at < end:
            if end - at >= 12 and data[at] == 1:
                _, channel, size, class_id, method_id = unpack(data, at)
                handle = handlers.get((channel, method_id)) if class_id == _BASIC else None
                if handle is not None:
                    head = at + size + 8
                    content = _parse_content(data, head)
                    if content is None:
                        return at
                    properties, body, after = content
                    handle(data, at, head, properties, body)
                    at = after
                    continue
            consumed, value = self._decode(_next_frame(data, at))
            if value is None:
                return at
            at += consumed
            self._process_frame(value)
        return at


def connection_class() -> type[Any]:
    """Returns a subclass of pika's ``SelectConnection`` with ``frames``, a :class:`FrameReader`.

    It overrides a private method of pika that parses frames.  A test compares the results of both
    parsers.

    :raises ProducerError: If this pika has no such method.
    """
    import pika

    base: type[SelectConnection] = pika.SelectConnection
    if not hasattr(base, "_on_data_available") or not hasattr(base, "_process_frame"):
        raise ProducerError(
            f"pika {pika.__version__} is not supported: install a release from 1.3.2 to 1.x"
        )

    class Connection(base):  # type: ignore[misc]
        """Pika's connection with a parser of our own."""

        def __init__(self, parameters: Parameters, **callbacks: Any) -> None:
            self.frames = FrameReader(self._process_frame)
            super().__init__(parameters, **callbacks)

        def sever(self) -> None:
            """Closes the socket immediately, without an AMQP close."""
            sock = getattr(getattr(self, "_transport", None), "_sock", None)
            if sock is not None:
                sock.close()

        def _on_data_available(self, data_in: bytes) -> None:
            self.bytes_received += len(data_in)  # for pika's heartbeat check; frames may be partial
            try:
                self.frames.feed(data_in)
            except OSError as error:  # pika would handle it as a socket error
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return Connection


def _next_frame(data: bytes, at: int) -> bytes:
    """Returns the next frame for pika, or its incomplete data."""
    if len(data) - at < 7 or data[at : at + 4] == b"AMQP":
        return data[at:]
    size = _FRAME.unpack_from(data, at)[2]
    return data[at : at + size + 8]


def _count_missing(data: bytes) -> int:
    """Returns the bytes missing until the end of the first body, if its size is known; else 0."""
    if len(data) < 12 or data[0] != 1:
        return 0
    _kind, _, size, class_id, method_id = _METHOD.unpack_from(data, 0)
    head = size + 8
    if class_id != _BASIC or method_id != _DELIVER or len(data) < head + 19:
        return 0
    size, body = _HEADER.unpack_from(data, head)[2], _HEADER.unpack_from(data, head)[5]
    return int(max(0, head + size + 8 + body - len(data)))
