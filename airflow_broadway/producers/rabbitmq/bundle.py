"""The format of a holding queue's messages: many source messages in one body, nothing executable.

::

    bundle   = "AFBW" version:u8 header messages
    header   = length:u32 JSON       the attributes of the whole bundle: see Header
    message  = body_length:u32 properties_length:u32 attempt:u32 flags:u8
               route_length:u16 id_length:u8 id route properties body

Numbers are big-endian and unsigned.  ``route`` and ``properties`` are bytes of the delivery.
``route`` is its exchange and routing key, as short strings.  ``properties`` is its content header,
from the property flags on.  The flag 1 is ``redelivered``.

The first bundle of a generation has no messages: it opens the holding queue, and names the
generation and the end of its lease.

``version`` is raised when an old reader could misread a bundle.  A reader that does not support a
bundle's version leaves the bundle in the queue.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import pluralize

VERSION = 3
#: The most messages in a bundle.
MAX_MESSAGES = 500
#: Bytes of messages at which a bundle is closed; a single larger message is a bundle of its own.
MAX_BYTES = 1024 * 1024

#: The first bytes of a bundle.
MAGIC = b"AFBW"
_MESSAGE = struct.Struct(">IIIBHB")
_MAX_HEADER = 1024 * 1024


class BundleError(ProducerError):
    """A body is not a bundle, is damaged, or has a version that this release cannot read."""


class Held(NamedTuple):
    """A message in a bundle.

    :param message_id: Its id, assigned at its first receipt.
    :param attempt: The number of its current attempt, from 1.
    :param route: As in :class:`~airflow_broadway.producers.rabbitmq.amqp.wire.Delivered`.
    """

    message_id: str
    attempt: int
    redelivered: bool
    route: bytes
    properties: bytes
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a bundle.

    :param bundle: The bundle's id; unique.
    :param generation: The generation that holds it.
    :param queue: The source queue.
    :param count: The number of messages in it.
    :param until: The end of the generation's lease, in seconds since the epoch.
    :param owner: dag_id, run_id, task_id, map_index and try_number, for display.
    """

    bundle: str
    generation: str
    queue: str
    count: int
    until: float
    owner: dict[str, Any] = field(default_factory=dict)


def pack(header: Header, messages: Iterable[Held]) -> bytes:
    """Serializes a bundle."""
    head = json.dumps(asdict(header), separators=(",", ":")).encode()
    parts = [MAGIC, struct.pack(">BI", VERSION, len(head)), head]
    add, pack_prefix = parts.append, _MESSAGE.pack
    for message_id, attempt, redelivered, route, properties, body in messages:
        key = message_id.encode()
        add(pack_prefix(len(body), len(properties), attempt, redelivered, len(route), len(key)))
        add(key)
        add(route)
        add(properties)
        add(body)
    return b"".join(parts)


def read_header(data: bytes) -> tuple[Header, int]:
    """Returns the header, and the offset of the first message.

    :raises BundleError: If this release cannot read the bundle.
    """
    if data[:4] != MAGIC or len(data) < 9:
        raise BundleError("a message in a holding queue is no bundle")
    version, length = struct.unpack_from(">BI", data, 4)
    if version != VERSION:
        raise BundleError(
            f"a bundle has format version {version}, and this release reads {VERSION}: use the"
            " release of airflow-broadway that wrote it, or a newer one"
        )
    if length > _MAX_HEADER or 9 + length > len(data):
        raise BundleError("a bundle is damaged: its header is cut off")
    try:
        header = Header(**json.loads(data[9 : 9 + length]))
    except (ValueError, TypeError, RecursionError) as error:
        raise BundleError(f"a bundle is damaged: {error}") from None
    invalid = [name for name, is_valid in _FIELDS.items() if not is_valid(getattr(header, name))]
    if invalid:
        raise BundleError(f"a bundle is damaged: its header has no proper {', '.join(invalid)}")
    return header, 9 + length


def contents(data: bytes) -> str:
    """Describes a bundle for display; empty if the bytes are not a bundle.

    Operators move bundles into a source queue by mistake, and any publisher can forge one.
    """
    if data[:4] != MAGIC:
        return ""
    try:
        header, _ = read_header(data)
    except BundleError:
        return ""
    return f"a bundle of {pluralize(header.count, 'message')} from the queue {header.queue!r}"


#: The checks of a header's values: any publisher can forge a header.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "bundle": lambda value: isinstance(value, str) and value != "",
    "generation": lambda value: isinstance(value, str) and value != "",
    "queue": lambda value: isinstance(value, str),
    "count": lambda value: isinstance(value, int) and value >= 0,
    "until": lambda value: isinstance(value, int | float) and math.isfinite(value),
    "owner": lambda value: isinstance(value, dict),
}


def unpack(data: bytes) -> tuple[Header, list[Held]]:
    """Returns the header and the messages, in order.

    :raises BundleError: If this release cannot read the bundle, or it is damaged.
    """
    header, at = read_header(data)
    try:
        messages = list(_read_messages(data, at))
    except (struct.error, UnicodeDecodeError) as error:
        raise BundleError(f"a bundle is damaged: {error}") from None
    if len(messages) != header.count:
        raise BundleError(
            f"a bundle is damaged: it holds {len(messages)} of {pluralize(header.count, 'message')}"
        )
    return header, messages


def _read_messages(data: bytes, at: int) -> Iterator[Held]:
    while at < len(data):
        size, properties, attempt, flags, route, key = _MESSAGE.unpack_from(data, at)
        first = at + _MESSAGE.size
        second = first + key
        third = second + route
        fourth = third + properties
        at = fourth + size
        if at > len(data):
            raise BundleError("a bundle is damaged: its last message is cut off")
        if not key or not attempt or not _is_route(data[second:third]):
            raise BundleError("a bundle is damaged: a message lacks its id, attempt or route")
        yield Held(
            data[first:second].decode(),
            attempt,
            bool(flags & 1),
            data[second:third],
            data[third:fourth],
            data[fourth:at],
        )


def _is_route(route: bytes) -> bool:
    """Whether the bytes are an exchange and a routing key, as short strings."""
    if not route or len(route) < route[0] + 2:
        return False
    return len(route) == route[0] + 2 + route[route[0] + 1]
