"""Reads deliveries straight from the socket's bytes, and hands all else to pika.

pika makes five objects of every delivery and decodes all its properties.  That is more work than
all else a run does with a message; and headers that pika cannot decode cost it the connection.
Here a delivery is one tuple, with the properties as the bytes they came in.  They are decoded when
somebody asks (module ``properties``), so that hostile headers fail their own message alone.
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
    """One delivery.

    :param tag: Its delivery tag, on its channel.
    :param redelivered: Whether the broker delivered it before.
    :param route: Exchange and routing key, each a byte of length and its bytes.
    :param properties: Property flags and property list, as in the content header.
    """

    tag: int
    redelivered: bool
    route: bytes
    properties: bytes
    body: bytes


def split_route(route: bytes) -> tuple[str, str]:
    """Exchange and routing key of a delivery."""
    first = 1 + route[0] if route else 0
    exchange, key = route[1:first], route[first + 1 :]
    return exchange.decode("utf-8", "backslashreplace"), key.decode("utf-8", "backslashreplace")


def join_route(exchange: str, key: str) -> bytes:
    """The route that :func:`split_route` reads; what is longer than AMQP allows is cut."""
    parts = (text.encode("utf-8", "replace")[:255] for text in (exchange, key))
    return b"".join(bytes([len(raw)]) + raw for raw in parts)


#: type, channel, size, class id, method id
_METHOD = struct.Struct(">BHIHH")
#: Delivery tag, and whether it was delivered before.
_TAG = struct.Struct(">QB")
#: type, channel, size, class id, weight, body size
_HEADER = struct.Struct(">BHIHHQ")
_FRAME = struct.Struct(">BHI")

#: The class ``basic``, and those of its methods that bring a message.
_BASIC = 60
_RETURN, _DELIVER, _GET_OK = 50, 60, 71

#: Takes a message: all that came, where its method begins and ends, its properties and its body.
_Taker = Callable[[bytes, int, int, bytes, bytes], None]


def _content(data: bytes, at: int) -> tuple[bytes, bytes, int] | None:
    """What begins with the header frame at ``at``: properties, body, and where it ends.

    ``None`` if it is not all there yet.
    """
    end = len(data)
    if at + 21 > end:
        return None
    _, _, size, _, _, left = _HEADER.unpack_from(data, at)
    after = at + size + 8
    properties = data[at + 19 : after - 1]
    parts = []
    while left:  # a body comes in one frame or in several
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
    """Reads what comes over one connection: messages as they are asked for, the rest as pika does.

    :param process_frame: Called with each frame that is left to pika.
    """

    def __init__(self, process_frame: Callable[[Any], None]) -> None:
        from pika.frame import decode_frame

        #: Called after every portion of data.
        self.after_data: Callable[[], None] | None = None
        self._takers: dict[tuple[int, int], _Taker] = {}
        self._decode = decode_frame
        self._process_frame = process_frame
        self._parts: list[bytes] = []
        self._missing = 0

    def on_delivery(self, channel: int, function: Callable[[Delivered], None]) -> None:
        """Has ``function`` called with each delivery on a channel."""

        def take(data: bytes, at: int, end: int, properties: bytes, body: bytes) -> None:
            place = at + 12 + data[at + 11]  # after the consumer's tag
            tag, redelivered = _TAG.unpack_from(data, place)
            route = data[place + 9 : end - 1]
            function(Delivered(tag, redelivered != 0, route, properties, body))

        self._takers[channel, _DELIVER] = take

    def on_get(self, channel: int, function: Callable[[Delivered], None]) -> None:
        """Has ``function`` called with each message that was asked for on a channel."""

        def take(data: bytes, at: int, end: int, properties: bytes, body: bytes) -> None:
            tag, redelivered = _TAG.unpack_from(data, at + 11)
            route = data[at + 20 : end - 5]  # a count of messages follows
            function(Delivered(tag, redelivered != 0, route, properties, body))

        self._takers[channel, _GET_OK] = take

    def on_return(self, channel: int, function: Callable[[int, str, bytes], None]) -> None:
        """Has ``function`` called with code, text and properties of each return on a channel."""

        def take(data: bytes, at: int, end: int, properties: bytes, body: bytes) -> None:
            code = int.from_bytes(data[at + 11 : at + 13], "big")
            text = data[at + 14 : at + 14 + data[at + 13]].decode("utf-8", "replace")
            function(code, text, properties)

        self._takers[channel, _RETURN] = take

    def feed(self, data_in: bytes) -> None:
        """Read what came, after what was left of the portion before."""
        self._parts.append(data_in)
        self._missing -= len(data_in)
        if self._missing > 0:  # a large body: joining what has come so far is of no use yet
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        at = self._read(data)
        rest = data[at:] if at else data
        self._parts = [rest] if rest else []
        self._missing = _missing(rest)
        if self.after_data is not None:
            self.after_data()

    def _read(self, data: bytes) -> int:
        """Reads all frames that are whole; returns where reading stopped."""
        takers, unpack = self._takers, _METHOD.unpack_from
        at, end = 0, len(data)
        while at < end:
            if end - at >= 12 and data[at] == 1:
                _, channel, size, class_id, method_id = unpack(data, at)
                take = takers.get((channel, method_id)) if class_id == _BASIC else None
                if take is not None:
                    head = at + size + 8
                    content = _content(data, head)
                    if content is None:
                        return at
                    properties, body, after = content
                    take(data, at, head, properties, body)
                    at = after
                    continue
            consumed, value = self._decode(_one_frame(data, at))
            if value is None:
                return at
            at += consumed
            self._process_frame(value)
        return at


def connection_class() -> type[Any]:
    """Pika's ``SelectConnection``, with ``frames``: the :class:`FrameReader` of what comes.

    It changes how pika reads frames, in a method that is pika's own business: a test reads with
    both and compares.

    :raises ProducerError: If this pika has no such method.
    """
    import pika

    base: type[SelectConnection] = pika.SelectConnection
    if not hasattr(base, "_on_data_available") or not hasattr(base, "_process_frame"):
        raise ProducerError(
            f"pika {pika.__version__} is not supported: install a release from 1.3.2 to 1.x"
        )

    class Connection(base):  # type: ignore[misc]
        """Pika's connection, but for how it reads."""

        def __init__(self, parameters: Parameters, **callbacks: Any) -> None:
            self.frames = FrameReader(self._process_frame)
            super().__init__(parameters, **callbacks)

        def sever(self) -> None:
            """Close the socket at once, without a word to the broker."""
            sock = getattr(getattr(self, "_transport", None), "_sock", None)
            if sock is not None:
                sock.close()

        def _on_data_available(self, data_in: bytes) -> None:
            self.bytes_received += len(data_in)  # a sign of life, before a frame is whole
            try:
                self.frames.feed(data_in)
            except OSError as error:  # pika would take it for the socket's
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return Connection


def _one_frame(data: bytes, at: int) -> bytes:
    """What pika is to read next: one frame, or all that is there of it."""
    if len(data) - at < 7 or data[at : at + 4] == b"AMQP":
        return data[at:]
    size = _FRAME.unpack_from(data, at)[2]
    return data[at : at + size + 8]


def _missing(data: bytes) -> int:
    """Bytes to wait for before reading on: to the end of the first body, where it shows."""
    if len(data) < 12 or data[0] != 1:
        return 0
    _kind, _, size, class_id, method_id = _METHOD.unpack_from(data, 0)
    head = size + 8
    if class_id != _BASIC or method_id != _DELIVER or len(data) < head + 19:
        return 0
    size, body = _HEADER.unpack_from(data, head)[2], _HEADER.unpack_from(data, head)[5]
    return int(max(0, head + size + 8 + body - len(data)))
