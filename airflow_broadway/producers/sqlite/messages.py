"""Checks messages that are sent, and leases ready ones: all of a call in one transaction."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.errors import LeaseLapsed, ProducerError
from airflow_broadway.core.model.acks import NO_ACK, AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.sqlite import admin, settling
from airflow_broadway.producers.sqlite.database import (
    OpenQueue,
    from_micros,
    ranges,
    to_micros,
    transaction,
)

log = logging.getLogger(__name__)

#: The most bytes of one body: SQLite's limit on a row, less room for the attributes.
MAX_BODY = 999_000_000

#: What may be sent: a body, a body and its attributes, or these and a delay in seconds.
Body = bytes | bytearray | memoryview | str
Sendable = (
    Body | tuple[Body, Mapping[str, Any] | None] | tuple[Body, Mapping[str, Any] | None, float]
)
#: Bytes of bodies after which :func:`receive` stops short of its demand.
MAX_RECEIVE_BYTES = 64 * 1024 * 1024

# What another program wrote into the file may be of any type: a body is bytes, whatever it was.
_READY: Final = """SELECT m.id, CAST(b.body AS BLOB), CAST(b.attributes AS BLOB), m.enqueued_at,
    m.attempt, m.deliveries
    FROM messages m LEFT JOIN bodies b ON b.id = m.id
    WHERE m.queue = ? AND m.lease IS NULL AND m.ready_at <= ?
    AND (m.giver IS NULL OR m.giver IS NOT ?)
    ORDER BY m.ready_at, m.enqueued_at, m.id LIMIT ?"""
_ANY_READY: Final = """SELECT EXISTS (SELECT 1 FROM messages WHERE queue = :queue AND lease IS NULL
    AND ready_at <= :now AND (giver IS NULL OR giver IS NOT :lease))
    OR EXISTS (SELECT 1 FROM leases WHERE queue = :queue AND state = 'open' AND deadline <= :now
    AND id IS NOT :lease)"""


# -- sending ---------------------------------------------------------------------------------------


def parts(message: Sendable, place: int) -> tuple[bytes, str | None, int]:
    """A message's body, attributes as JSON, and delay in microseconds.

    :param place: Its place among those sent, for errors.
    :raises ProducerError: If one of them is not what it must be.
    """
    attributes: Any = None
    delay: Any = 0.0
    body: Any = message
    try:
        if isinstance(message, tuple):
            if len(message) not in (2, 3):
                raise _bad("a body, (body, attributes) or (body, attributes, delay)", message)
            body, attributes, delay = (*message, 0.0)[:3]
        if delay and not (isinstance(delay, (int, float)) and 0 <= delay < settling.MAX_DELAY):
            raise _bad("a delay in seconds of at least 0", delay)
        return _body(body), _attributes(attributes), settling.micros_of(delay or 0.0)
    except ValueError as error:
        raise ProducerError(f"message {place} was not sent: {error}") from None


def _body(body: Any) -> bytes:
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"its text cannot be encoded as UTF-8: {error}") from None
    elif not isinstance(body, (bytes, bytearray, memoryview)):
        raise _bad("a body of bytes or text", body)
    encoded = bytes(body)
    if len(encoded) > MAX_BODY:
        raise ValueError(
            f"its body has {len(encoded)} bytes, and a row holds at most {MAX_BODY}: store it"
            " elsewhere, and send its address"
        )
    return encoded


def _attributes(attributes: Any) -> str | None:
    if attributes is not None and not isinstance(attributes, Mapping):
        raise _bad("attributes in a mapping", attributes)
    try:
        return json.dumps(dict(attributes), allow_nan=False) if attributes else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"its attributes are no JSON: {error}") from None


def _bad(rule: str, value: object) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ValueError(f"expected {rule}, got: {shown}")


# -- receiving -------------------------------------------------------------------------------------


class Portion(NamedTuple):
    """What one call asks for.

    :param position: That of its first message.
    :param at: When it asks.
    :param seconds: For how long; ``owner``: for whom.
    """

    generation: str
    demand: int
    position: int
    at: datetime
    seconds: float
    owner: Mapping[str, Any]


def receive(queue: OpenQueue, portion: Portion) -> list[Message]:
    """Leases what is ready.

    :raises LeaseLapsed: If the generation's lease has ended.
    """
    generation, now = portion.generation, to_micros(portion.at)
    # Polling an empty queue takes no lock and writes nothing.
    lease = _open_lease(queue, generation)
    look = {"queue": queue.id, "now": now, "lease": lease}
    if not queue.db.execute(_ANY_READY, look).fetchone()[0]:
        return []
    with transaction(queue.db):
        lease = _open_lease(queue, generation)
        settling.end_lapsed(queue, now, spared=lease)
        while True:
            # Made before the commit: what fails here stays in the queue.
            rows = _rows(queue, portion, now, lease)
            messages, unread = _messages(queue, portion, rows)
            admin.set_aside(queue, unread, generation, now)
            if messages or not rows:
                break
        if messages:
            lease = lease or settling.new_lease(
                queue, generation, now, owner=portion.owner, seconds=portion.seconds
            )
            deadline = now + settling.micros_of(portion.seconds)
            queue.db.execute(
                "UPDATE leases SET received = received + ?, deadline = max(deadline, ?)"
                " WHERE id = ?",
                (len(messages), deadline, lease),
            )
            queue.db.executemany(
                f"UPDATE messages SET lease = {lease:d}, deliveries = deliveries + 1"
                " WHERE id BETWEEN ? AND ?",
                ranges([row[0] for row in rows if row[0] not in unread]),
            )
        return messages


def _rows(queue: OpenQueue, portion: Portion, now: int, lease: int | None) -> list[tuple[Any, ...]]:
    """Ready rows, up to a demand or a size of bodies."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in queue.db.execute(_READY, (queue.id, now, lease, portion.demand)):
        rows.append(row)
        size += len(row[1] or b"")
        if size >= MAX_RECEIVE_BYTES:
            break
    return rows


def _messages(
    queue: OpenQueue, portion: Portion, rows: list[tuple[Any, ...]]
) -> tuple[list[Message], dict[int, str]]:
    """The messages of rows; and of those that cannot be read, by row, why."""
    prefix, position = queue.tag + "-", portion.position
    unread: dict[int, str] = {}
    acknowledger = AckRef(NO_ACK.acknowledger, portion.generation, Delivery())
    messages = []
    sent, sent_at = None, ""
    for row, body, attributes, enqueued_at, attempt, deliveries in rows:
        metadata: dict[str, Any]
        try:
            if enqueued_at != sent:
                sent, sent_at = None, from_micros(enqueued_at).isoformat()
                sent = enqueued_at
            metadata = {"queue": queue.name, "enqueued_at": sent_at}
            if attributes is not None:
                metadata["attributes"] = json.loads(attributes)
            redelivered, size = deliveries > 0, len(body)
            if type(attempt) is not int:
                raise TypeError(f"its attempt is {attempt!r}")
        except Exception as error:  # one that another program wrote fails alone
            unread[row] = f"cannot be read: {type(error).__name__}: {error}"
            log.error("message %s%d of queue %r %s", prefix, row, queue.name, unread[row])
            continue
        messages.append(
            Message(
                body,
                metadata=metadata,
                acknowledger=acknowledger,
                message_id=prefix + str(row),
                attempt=attempt,
                redelivered=redelivered,
                received_at=portion.at,
                position=position,
                size=size,
            )
        )
        position += 1
    return messages, unread


def _open_lease(queue: OpenQueue, generation: str) -> int | None:
    """The key of the generation's lease, or ``None`` if it has not received anything yet."""
    row = queue.db.execute(
        "SELECT id, state, ended_at FROM leases WHERE queue = ? AND generation = ?",
        (queue.id, generation),
    ).fetchone()
    if row is None:
        return None
    if row[1] != "open":
        raise LeaseLapsed(
            f"generation {generation!r} receives no more from queue {queue.name!r}: its lease"
            f" was {row[1]} at {from_micros(row[2]).isoformat()};"
            " a new execution opens a new one"
        )
    return int(row[0])
