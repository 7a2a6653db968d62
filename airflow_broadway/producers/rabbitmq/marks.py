"""Marks republished messages, and restores their original properties at the next receipt.

A message that is released, retried or dead-lettered keeps all its properties and headers, byte for
byte.  Two headers of ours are added: ``x-broadway`` is its :class:`Mark`; ``x-broadway-original``
has the values that would do harm in their own place: the original route, ``user_id``,
``expiration``, ``x-death``, ``CC`` and ``BCC``.  The run that receives the message restores them,
so callbacks and dead letters see the message as it was first received.

A digest binds the mark to its message.  Programs that reply to messages or forward them copy
headers: a mark on another message is ignored.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import cut
from airflow_broadway.producers.rabbitmq.amqp import properties as codec
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered, split_route
from airflow_broadway.producers.rabbitmq.bundle import Held

#: A message to republish: a delivery, or a message of a bundle.
Content = Delivered | Held
#: The header of a republished message: see :class:`Mark`.
MARK = "x-broadway"
#: The prefix of all our headers.
_MARK = MARK.encode()
#: The header with the values that could not stay in their own place.
ORIGINAL = "x-broadway-original"
#: Headers that do harm when republished: ``x-death`` makes the broker drop the message as a cycle,
#: ``CC`` and ``BCC`` route stray copies.
_DEATHS = (b"x-death", b"x-first-death-", b"x-last-death-")
_COPIES = (b"CC", b"BCC")
#: Such properties: another user's ``user_id`` is refused, ``expiration`` ends a delay early.
_HARMFUL = ("user_id", "expiration")
#: The properties that a mark is bound to, in addition to the body: no broker or plugin sets them.
_BOUND = ("content_type", "correlation_id", "message_id", "type", "app_id")

#: The errors raised by reading a header that is not a mark.
_NO_MARK = (
    ProducerError, StopIteration, TypeError, AttributeError,
    LookupError, ValueError, ArithmeticError,
)  # fmt: skip
#: The largest id, in bytes, and attempt of a valid mark.
_MAX_ID, _MAX_ATTEMPT = 200, 1_000_000
#: Bytes to which the reason is cut if the message has no room for more.
_SHORT_REASON = 64
#: Bytes of properties in a header frame of the default size.
MAX_PROPERTIES = 131_072 - 20


class TooLarge(ProducerError):
    """A message's own headers leave no room for our mark in a frame."""


class Mark(NamedTuple):
    """The mark of a republished message.

    :param message_id: Its id, assigned at its first receipt.
    :param released_by: The generation that republished it, and does not receive it itself;
        ``giver`` in the header.
    :param attempt: The number of its current attempt.
    :param turn: The settlement of that generation that republished it: each publishes a message
        once.
    :param digest: The digest of the message; see :meth:`belongs_to`.
    """

    message_id: str
    released_by: str
    attempt: int
    turn: str = ""
    digest: str = ""

    def belongs_to(self, message: Content) -> bool:
        """Whether the mark was made for this very message."""
        return self.digest == _digest(message)


def mark_of(properties: bytes) -> Mark | None:
    """Returns the mark of a message; ``None`` without a valid one."""
    if _MARK not in properties:
        return None
    try:
        headers = codec.entries_of(codec.fields_of(properties).get("headers"))
        value = next(codec.decode_entry(raw) for name, raw in headers if name == _MARK)
        mark = Mark(
            str(value["id"]),
            str(value["giver"]),
            max(1, int(value["attempt"])),
            str(value.get("turn", "")),
            str(value.get("digest", "")),
        )
    except _NO_MARK:
        return None
    texts = (mark.message_id, mark.released_by, mark.turn)
    longest = max(len(text.encode("utf-8", "replace")) for text in texts)
    if longest > _MAX_ID or mark.attempt > _MAX_ATTEMPT:
        return None  # not one of ours
    return mark


def _digest(message: Content) -> str:
    digest = hashlib.blake2b(message.body, digest_size=12)
    try:
        fields = codec.fields_of(message.properties)
    except ProducerError:
        fields = {}
    for name in _BOUND:
        digest.update(b"\0" + fields.get(name, b""))
    return digest.hexdigest()


def publication_key(properties: bytes) -> str | None:
    """Returns the key of a returned publication: its mark's id, else its ``message_id``."""
    mark = mark_of(properties)
    return codec.message_id_of(properties) if mark is None else mark.message_id


# -- republishing ----------------------------------------------------------------------------------


def republished(
    message: Content,
    mark: Mark,
    *,
    extra: Mapping[str, Any] | None = None,
    limit: int = MAX_PROPERTIES,
) -> bytes:
    """Returns the properties with which a message is republished.

    If they exceed ``limit``, the reason is cut, then the original values are omitted.

    :param extra: More headers of ours, such as the reason of a dead letter.
    :param limit: Bytes of properties that fit a frame of the connection.
    :raises TooLarge: If there is no room even for the mark.
    """
    fields, rest, original = _split_properties(message)
    extra = dict(extra or {})
    reason = str(extra.get("x-broadway-reason", ""))
    short = {**extra, "x-broadway-reason": cut(reason, _SHORT_REASON)} if reason else extra
    lean = [entry for entry in original if not _is_harmful(entry[0]) and entry[0] != b"unreadable"]
    value = {"id": mark.message_id, "giver": mark.released_by, "attempt": mark.attempt}
    value |= {"turn": mark.turn, "digest": _digest(message)}
    for added, preserved in ((extra, original), (short, lean), ({}, lean), ({}, [])):
        ours = [codec.encode_entry(MARK, value)]
        ours += [codec.encode_entry(name, value) for name, value in added.items()]
        if preserved:
            ours.append((ORIGINAL.encode(), b"F" + codec.join_entries(preserved)))
        properties = codec.join_fields({**fields, "headers": codec.join_entries([*rest, *ours])})
        if len(properties) <= limit:
            return properties
    raise TooLarge(
        f"its headers have {len(message.properties)} bytes, and with our mark would pass the"
        f" {limit} that one frame holds"
    )


def dead_lettered(
    message: Content,
    mark: Mark,
    *,
    reason: str,
    stage: str,
    source: str,
    now: datetime,
    repeated: bool = False,
    limit: int = MAX_PROPERTIES,
) -> bytes:
    """Returns the properties of a dead letter; its attempts start from 1 when it is requeued.

    :param mark: Its mark, with the number of its last attempt.
    :param source: Its source queue.
    :param repeated: Whether the same message may have been dead-lettered before.
    :param limit: See :func:`republished`; without room for any header of ours, none is added.
    """
    details = {
        "x-broadway-reason": cut(reason, MAX_REASON),
        "x-broadway-stage": stage,
        "x-broadway-attempt": mark.attempt,
        "x-broadway-queue": source,
        "x-broadway-dead-at": now.isoformat(),
    }
    if repeated:
        details["x-broadway-redelivered"] = True
    try:
        return republished(message, mark._replace(attempt=1), extra=details, limit=limit)
    except TooLarge:
        fields, rest, _ = _split_properties(message)
        bare = {**fields, "headers": codec.join_entries(rest)}
        if len(codec.join_fields(bare)) > limit:  # delivery_mode is the byte too many
            del bare["delivery_mode"]
        return codec.join_fields(bare)


def _split_properties(
    message: Content,
) -> tuple[dict[str, bytes], list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    """Splits a message's properties: kept fields, kept headers, and entries of ``ORIGINAL``."""
    original: list[tuple[bytes, bytes]] = []
    exchange, key = split_route(message.route)
    if exchange:  # the default exchange's routing key is the queue's own name
        original += [
            codec.encode_entry("exchange", exchange),
            codec.encode_entry("routing_key", key),
        ]
    try:
        fields = codec.fields_of(message.properties)
        headers = codec.entries_of(fields.get("headers"))
    except ProducerError:  # unreadable properties are kept as a whole
        unreadable = codec.encode_entry("unreadable", message.properties)
        return {"delivery_mode": b"\x02"}, [], [*original, unreadable]
    rest = []
    for name, raw in headers:
        if _is_harmful(name):
            original.append((name, raw))
        elif not name.startswith(_MARK):
            rest.append((name, raw))
    for field in _HARMFUL:
        value = fields.pop(field, None)
        if value is not None:
            original.append((field.encode(), b"S" + struct.pack(">I", value[0]) + value[1:]))
    mode = fields.get("delivery_mode")
    if mode != b"\x02":
        original.append(codec.encode_entry("delivery_mode", None if mode is None else mode[0]))
    fields["delivery_mode"] = b"\x02"
    return fields, rest, original


def _is_harmful(name: bytes) -> bool:
    return name in _COPIES or name.startswith(_DEATHS)


# -- restoring -------------------------------------------------------------------------------------


def restored(route: bytes, properties: bytes, *, trusted: bool) -> tuple[bytes, bytes]:
    """Returns the route and properties of a republished message at its first receipt.

    :param trusted: Whether a settlement of ours is known to have republished it.  Only then is
        ``user_id`` restored: the broker validated it for the original publisher only.
    """
    fields = codec.fields_of(properties)
    headers = codec.entries_of(fields.get("headers"))
    original = _read_original(headers)
    if b"unreadable" in original:
        raw = codec.decode_entry(original[b"unreadable"])
        return _restore_route(route, original), raw if isinstance(raw, bytes) else properties
    rest = [header for header in headers if not header[0].startswith((_MARK, *_DEATHS))]
    # Entries added since it was republished are from our delay queues, or from foreign queues.
    deaths = _deaths(dict(headers).get(b"x-death")) + _deaths(original.pop(b"x-death", None))
    if deaths:
        rest.append((b"x-death", codec.join_array(deaths)))
    rest += [header for header in original.items() if _is_harmful(header[0])]
    if rest:
        fields["headers"] = codec.join_entries(rest)
    else:
        fields.pop("headers", None)
    for field in _HARMFUL:
        text = original.get(field.encode())
        if text is not None and text[:1] == b"S" and (trusted or field != "user_id"):
            fields[field] = bytes([len(text[5:260])]) + text[5:260]
    mode = codec.decode_entry(original.get(b"delivery_mode", b"l" + bytes(7) + b"\x02"))
    fields.pop("delivery_mode", None)
    if isinstance(mode, int) and 0 <= mode < 256:
        fields["delivery_mode"] = bytes([mode])
    return _restore_route(route, original), codec.join_fields(fields)


def _read_original(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    raw = dict(headers).get(ORIGINAL.encode(), b"V")
    try:
        return dict(codec.entries_of(raw[1:])) if raw[:1] == b"F" else {}
    except ProducerError:
        return {}


def _restore_route(route: bytes, original: Mapping[bytes, bytes]) -> bytes:
    parts = [original.get(name, b"V") for name in (b"exchange", b"routing_key")]
    if any(part[:1] != b"S" or len(part) > 5 + 255 for part in parts):
        return route
    return b"".join(bytes([len(part) - 5]) + part[5:] for part in parts)


def _deaths(raw: bytes | None) -> list[bytes]:
    """Returns the entries of an ``x-death`` without those of our own queues, in their raw bytes."""
    try:
        return [death for death in codec.array_of(raw) if is_foreign(codec.decode_entry(death))]
    except ProducerError:
        return []


def is_foreign(death: object) -> bool:
    """Whether an ``x-death`` entry is from a queue that is not ours."""
    ours = isinstance(death, Mapping) and str(death.get("queue", "")).startswith("broadway.")
    return not ours
