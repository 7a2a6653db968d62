"""What a message carries that was published again, and how it is read back as what it was.

A message that is released, retried or set aside keeps all its properties and headers, byte for
byte.  Two headers of ours are added: ``x-broadway`` is its :class:`Mark`; ``x-broadway-original``
has what would do harm in its own place: the route it came by, ``user_id``, ``expiration``,
``x-death``, ``CC`` and ``BCC``.  The run that receives it puts all of that back, so callbacks and
dead letters see the message as it was first received.

A digest binds the mark to its message.  Programs that answer or forward messages copy headers: a
mark on another message is none.
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

#: What is published again: a delivery, or a message of a bundle.
Content = Delivered | Held
#: The header of a message that was published again: see :class:`Mark`.
MARK = "x-broadway"
#: All our headers begin so.
_MARK = MARK.encode()
#: The header with what could not be kept where it was.
ORIGINAL = "x-broadway-original"
#: Kept in their place, these would do harm: an ``x-death`` makes the broker drop the message as a
#: cycle, ``CC`` and ``BCC`` send stray copies.
_DEATHS = (b"x-death", b"x-first-death-", b"x-last-death-")
_COPIES = (b"CC", b"BCC")
#: The same for properties: a foreign ``user_id`` is refused, an ``expiration`` ends the wait early.
_HARMFUL = ("user_id", "expiration")
#: What a mark is bound to, beside the body: properties that no broker and no plugin writes.
_BOUND = ("content_type", "correlation_id", "message_id", "type", "app_id")

#: What reading a header raises that is no mark.
_NO_MARK = (
    ProducerError, StopIteration, TypeError, AttributeError,
    LookupError, ValueError, ArithmeticError,
)  # fmt: skip
#: What a mark of ours never exceeds.
_MAX_ID, _MAX_ATTEMPT = 200, 1_000_000
#: Bytes of the reason where the message has no room for more.
_SHORT_REASON = 64
#: Bytes of properties that a header frame of the usual size holds.
MAX_PROPERTIES = 131_072 - 20


class TooLarge(ProducerError):
    """A message's own headers leave no room for our mark in a frame."""


class Mark(NamedTuple):
    """What a message says of itself that was published again.

    :param message_id: Its id, kept from its first receipt.
    :param released_by: The generation that published it again, and does not take it itself.  The
        header calls it ``giver``.
    :param attempt: The attempt it is on.
    :param turn: Which settling of that generation published it: each publishes a message once.
    :param digest: What it is bound to; see :meth:`belongs_to`.
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
    """The mark of a message, if it bears one that can be read."""
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
    """What names a publication of ours when the broker returns it: its mark's id, else its own."""
    mark = mark_of(properties)
    return codec.message_id_of(properties) if mark is None else mark.message_id


# -- published again -------------------------------------------------------------------------------


def republished(
    message: Content,
    mark: Mark,
    *,
    extra: Mapping[str, Any] | None = None,
    limit: int = MAX_PROPERTIES,
) -> bytes:
    """The properties with which a message is published again.

    Where they would pass ``limit`` the reason is cut, then what it was is left out.

    :param extra: More headers of ours, such as the reason of a dead letter.
    :param limit: The most bytes that one frame of the connection holds.
    :raises TooLarge: If there is no room even for the mark.
    """
    fields, kept, original = _taken_apart(message)
    extra = dict(extra or {})
    reason = str(extra.get("x-broadway-reason", ""))
    short = {**extra, "x-broadway-reason": cut(reason, _SHORT_REASON)} if reason else extra
    lean = [entry for entry in original if not _harmful(entry[0]) and entry[0] != b"unreadable"]
    value = {"id": mark.message_id, "giver": mark.released_by, "attempt": mark.attempt}
    value |= {"turn": mark.turn, "digest": _digest(message)}
    for more, was in ((extra, original), (short, lean), ({}, lean), ({}, [])):
        ours = [codec.encode_entry(MARK, value)]
        ours += [codec.encode_entry(name, value) for name, value in more.items()]
        if was:
            ours.append((ORIGINAL.encode(), b"F" + codec.join_entries(was)))
        made = codec.join_fields({**fields, "headers": codec.join_entries([*kept, *ours])})
        if len(made) <= limit:
            return made
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
    """The properties of a dead letter, which starts with fresh attempts if it is sent back.

    :param mark: With the attempt that it died on.
    :param source: The queue that it comes from.
    :param repeated: Whether there may be another of the same message.
    :param limit: See :func:`republished`; a message without room for a word of ours goes bare.
    """
    why = {
        "x-broadway-reason": cut(reason, MAX_REASON),
        "x-broadway-stage": stage,
        "x-broadway-attempt": mark.attempt,
        "x-broadway-queue": source,
        "x-broadway-dead-at": now.isoformat(),
    }
    if repeated:
        why["x-broadway-redelivered"] = True
    try:
        return republished(message, mark._replace(attempt=1), extra=why, limit=limit)
    except TooLarge:
        fields, kept, _ = _taken_apart(message)
        bare = {**fields, "headers": codec.join_entries(kept)}
        if len(codec.join_fields(bare)) > limit:  # by the byte that makes it persistent
            del bare["delivery_mode"]
        return codec.join_fields(bare)


def _taken_apart(
    message: Content,
) -> tuple[dict[str, bytes], list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    """Fields that stay, headers that stay, and what is moved into the header of the original."""
    original: list[tuple[bytes, bytes]] = []
    exchange, key = split_route(message.route)
    if exchange:  # else it is the queue's own name
        original += [
            codec.encode_entry("exchange", exchange),
            codec.encode_entry("routing_key", key),
        ]
    try:
        fields = codec.fields_of(message.properties)
        headers = codec.entries_of(fields.get("headers"))
    except ProducerError:  # it cannot be read, so it cannot be kept but as it was
        unreadable = codec.encode_entry("unreadable", message.properties)
        return {"delivery_mode": b"\x02"}, [], [*original, unreadable]
    kept = []
    for name, raw in headers:
        if _harmful(name):
            original.append((name, raw))
        elif not name.startswith(_MARK):
            kept.append((name, raw))
    for field in _HARMFUL:
        value = fields.pop(field, None)
        if value is not None:
            original.append((field.encode(), b"S" + struct.pack(">I", value[0]) + value[1:]))
    mode = fields.get("delivery_mode")
    if mode != b"\x02":
        original.append(codec.encode_entry("delivery_mode", None if mode is None else mode[0]))
    fields["delivery_mode"] = b"\x02"
    return fields, kept, original


def _harmful(name: bytes) -> bool:
    return name in _COPIES or name.startswith(_DEATHS)


# -- received again --------------------------------------------------------------------------------


def restored(route: bytes, properties: bytes, *, trusted: bool) -> tuple[bytes, bytes]:
    """Route and properties as they were before the message was published again.

    :param trusted: Whether it is known to have been us who did: only then does it keep a
        ``user_id``, which the broker vouches for at the first receipt alone.
    """
    fields = codec.fields_of(properties)
    headers = codec.entries_of(fields.get("headers"))
    original = _original(headers)
    if b"unreadable" in original:
        was = codec.decode_entry(original[b"unreadable"])
        return _route(route, original), was if isinstance(was, bytes) else properties
    kept = [header for header in headers if not header[0].startswith((_MARK, *_DEATHS))]
    # Deaths since it was published again are our own ladder's, or else a queue's of somebody else.
    deaths = _deaths(dict(headers).get(b"x-death")) + _deaths(original.pop(b"x-death", None))
    if deaths:
        kept.append((b"x-death", codec.join_array(deaths)))
    kept += [header for header in original.items() if _harmful(header[0])]
    if kept:
        fields["headers"] = codec.join_entries(kept)
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
    return _route(route, original), codec.join_fields(fields)


def _original(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    raw = dict(headers).get(ORIGINAL.encode(), b"V")
    try:
        return dict(codec.entries_of(raw[1:])) if raw[:1] == b"F" else {}
    except ProducerError:
        return {}


def _route(route: bytes, original: Mapping[bytes, bytes]) -> bytes:
    parts = [original.get(name, b"V") for name in (b"exchange", b"routing_key")]
    if any(part[:1] != b"S" or len(part) > 5 + 255 for part in parts):
        return route
    return b"".join(bytes([len(part) - 5]) + part[5:] for part in parts)


def _deaths(raw: bytes | None) -> list[bytes]:
    """The entries of an ``x-death`` but for those of our own queues, as the bytes they came in."""
    try:
        return [death for death in codec.array_of(raw) if is_foreign(codec.decode_entry(death))]
    except ProducerError:
        return []


def is_foreign(death: object) -> bool:
    """Whether an entry of an ``x-death`` is no step of our own delays."""
    ours = isinstance(death, Mapping) and str(death.get("queue", "")).startswith("broadway.")
    return not ours
