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
    parts = (each.encode("utf-8", "replace")[:255] for each in (exchange, key))
    return b"".join(bytes([len(raw)]) + raw for raw in parts)


#: type, channel, size, class id, method id, length of the consumer tag
_DELIVER = struct.Struct(">BHIHHB")
_TAG = struct.Struct(">QB")
#: type, channel, size, class id, weight, body size
_HEADER = struct.Struct(">BHIHHQ")
_FRAME = struct.Struct(">BHI")
_METHOD_FRAME = struct.Struct(">BHIHH")

#: The class ``basic``, and its methods ``deliver`` and ``get-ok``.
_BASIC, _DELIVERY, _GOT = 60, 60, 71
#: Class and method of ``basic.return`` and ``basic.get-ok``, as bytes.
_RETURN, _GET_OK = b"\x00\x3c\x00\x32", b"\x00\x3c\x00\x47"


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


class Parser:
    """Finds the deliveries of one channel in a stream of frames.

    :param deliver: Called with each delivery.
    """

    def __init__(self, channel: int, deliver: Callable[[Delivered], None]) -> None:
        self._channel = channel
        self._deliver = deliver

    def parse(self, data: bytes, start: int) -> tuple[int, bool]:
        """Read whole deliveries from ``start`` on.

        :return: Where reading stopped, and whether there is another frame than a delivery's; else
            the rest of a delivery is still to come.
        """
        channel, deliver, make = self._channel, self._deliver, Delivered._make
        unpack, unpack_tag, content_of = _DELIVER.unpack_from, _TAG.unpack_from, _content
        end, at = len(data), start
        while at + 12 <= end:
            kind, number, size, class_id, method_id, length = unpack(data, at)
            if kind != 1 or number != channel or method_id != _DELIVERY or class_id != _BASIC:
                return at, True
            head = at + size + 8
            content = content_of(data, head)
            if content is None:
                return at, False
            place = at + 12 + length
            tag, redelivered = unpack_tag(data, place)
            properties, body, after = content
            deliver(make((tag, redelivered != 0, data[place + 9 : head - 1], properties, body)))
            at = after
        return at, at + 7 <= end and data[at] != 1


class FrameReader:
    """Reads what comes over one connection: deliveries by parsers, the rest as pika does.

    :param process_frame: Called with each frame that is left to pika.
    """

    def __init__(self, process_frame: Callable[[Any], None]) -> None:
        from pika.frame import decode_frame

        #: Channel number → the parser of its deliveries.
        self.parsers: dict[int, Parser] = {}
        #: Channel number → what is called with code, text and properties of a return.
        self.returned: dict[int, Callable[[int, str, bytes], None]] = {}
        #: Channel number → what is called with the message that was asked for.
        self.got: dict[int, Callable[[Delivered], None]] = {}
        #: Called after every portion of data.
        self.after_data: Callable[[], None] | None = None
        self._decode = decode_frame
        self._process_frame = process_frame
        self._parts: list[bytes] = []
        self._missing = 0

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
        """Read all frames that are whole; where reading stopped."""
        at, end = 0, len(data)
        while at < end:
            if end - at >= 7:
                parser = self.parsers.get(int.from_bytes(data[at + 1 : at + 3], "big"))
                if parser is not None:
                    at, other = parser.parse(data, at)
                    if not other:
                        return at
                method = data[at + 7 : at + 11] if data[at] == 1 else b""
                if method == _RETURN or (method == _GET_OK and self.got):
                    after = self._take_content(data, at)
                    if after is None:
                        return at
                    at = after
                    continue
            consumed, value = self._decode(_one_frame(data, at))
            if value is None:
                return at
            at += consumed
            self._process_frame(value)
        return at

    def _take_content(self, data: bytes, at: int) -> int | None:
        """Read one message that pika might not; where it ends, ``None`` if it is not all there."""
        _, channel, size, _, method = _METHOD_FRAME.unpack_from(data, at)
        head = at + size + 8
        content = _content(data, head)
        if content is None:
            return None
        properties, body, after = content
        if method == _GOT:
            got = self.got.get(channel)
            if got is not None:
                tag, redelivered = _TAG.unpack_from(data, at + 11)
                route = data[at + 20 : head - 5]
                got(Delivered(tag, redelivered != 0, route, properties, body))
        else:
            returned = self.returned.get(channel)
            if returned is not None:
                code = int.from_bytes(data[at + 11 : at + 13], "big")
                text = data[at + 14 : at + 14 + data[at + 13]].decode("utf-8", "replace")
                returned(code, text, properties)
        return after


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
    _kind, _, size, class_id, method_id, _ = _DELIVER.unpack_from(data, 0)
    head = size + 8
    if class_id != _BASIC or method_id != _DELIVERY or len(data) < head + 19:
        return 0
    size, body = _HEADER.unpack_from(data, head)[2], _HEADER.unpack_from(data, head)[5]
    return int(max(0, head + size + 8 + body - len(data)))
