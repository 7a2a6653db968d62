"""Reads a queue and its dead letters: depth, leases, and messages with the reason of their failure.

Dead letters lie in the queue's own file: one transaction sends them back, or deletes them, so that
each is in exactly one place after a kill.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter, Moved
from airflow_broadway.core.custody.protocol import Lease, QueueDepth
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.producers.sqlite.database import (
    OpenQueue,
    from_micros,
    ranges,
    to_micros,
    transaction,
)

#: Dead letters that are read at a time.
_PORTION: Final = 100
_LEASED = """SELECT COUNT(*), COALESCE(SUM(deadline <= :now), 0),
    MIN(CASE WHEN deadline <= :now THEN enqueued_at END)
    FROM leases JOIN messages ON lease = leases.id
    WHERE leases.queue = :queue AND state = 'open'"""


class LeaseRecord(NamedTuple):
    """What the queue knows of a lease, open or ended.

    :param state: ``"open"``, ``"settled"``, ``"released"`` or ``"lapsed"``.
    :param received: Messages received under it, in all.
    :param held: Messages that it holds now.
    :param report: How it ended, without what ``settle_now`` did; ``None`` while it is open.
    """

    lease: Lease
    state: str
    received: int
    held: int
    report: SettleReport | None


def depth(queue: OpenQueue, now: int) -> QueueDepth:
    """Returns how full the queue is; what a lapsed lease held counts as ready."""
    values = {"queue": queue.id, "now": now}
    with transaction(queue.db, "DEFERRED"):
        free, ready, oldest = queue.db.execute(
            "SELECT COUNT(*), COALESCE(SUM(ready_at <= :now), 0),"
            " MIN(CASE WHEN ready_at <= :now THEN enqueued_at END)"
            " FROM messages WHERE queue = :queue AND lease IS NULL",
            values,
        ).fetchone()
        held, lapsed, oldest_lapsed = queue.db.execute(_LEASED, values).fetchone()
        letters = "SELECT COUNT(*) FROM dead WHERE queue = :queue"
        [dead] = queue.db.execute(letters, values).fetchone()
    known = [instant for instant in (oldest, oldest_lapsed) if instant is not None]
    age = max(0.0, (now - min(known)) / 1_000_000) if known else None
    return QueueDepth(ready + lapsed, free - ready, held - lapsed, dead, age)


def leases(queue: OpenQueue, lease_of: dict[str, Any], *, ended: bool) -> list[LeaseRecord]:
    """Lists the leases on record, oldest first; the ended ones too if ``ended``.

    :param lease_of: What all leases of this queue have in common.
    """
    chosen = "" if ended else "AND state = 'open'"
    rows = queue.db.execute(
        "SELECT generation, owner, seconds, deadline, state, received,"
        " (SELECT COUNT(*) FROM messages WHERE lease = leases.id), report"
        f" FROM leases WHERE queue = ? {chosen} ORDER BY id",
        (queue.id,),
    )
    return [
        LeaseRecord(
            lease=Lease(
                generation=generation,
                seconds=seconds,
                deadline=from_micros(deadline),
                owner=_owner(owner),
                **lease_of,
            ),
            state=state,
            received=received,
            held=held,
            report=None if report is None else SettleReport.from_json(json.loads(report)),
        )
        for generation, owner, seconds, deadline, state, received, held, report in rows
    ]


def _owner(text: str) -> dict[str, Any]:
    """Reads the owner of a lease; empty where another program wrote it."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# -- dead letters ----------------------------------------------------------------------------------


def set_aside(queue: OpenQueue, rows: Mapping[int, str], generation: str, now: int) -> None:
    """Makes dead letters of messages that cannot be read; inside a transaction.

    :param rows: Row → reason.
    """
    for row, reason in rows.items():
        queue.db.execute(
            "INSERT INTO dead SELECT id, queue, CAST(enqueued_at AS INTEGER),"
            " max(1, CAST(attempt AS INTEGER)), CAST(deliveries AS INTEGER), 'secure', ?, ?, ?"
            " FROM messages WHERE id = ?",
            (reason[:500], now, generation, row),
        )
        queue.db.execute("DELETE FROM messages WHERE id = ?", (row,))


def letters(queue: OpenQueue, choice: Choice) -> Iterator[DeadLetter]:
    """Reads dead letters, in order of their death, some at a time."""
    after = (-1, -1)
    while True:
        rows: list[tuple[Any, ...]] = []
        for chosen, values in _chosen(queue, choice):
            rows += queue.db.execute(
                "SELECT died_at, id, reason, stage, attempt, enqueued_at, generation,"
                " CAST(body AS BLOB), CAST(attributes AS BLOB)"
                " FROM dead LEFT JOIN bodies USING (id)"
                f" WHERE {chosen} AND (died_at, id) > (?, ?) ORDER BY died_at, id LIMIT ?",
                (*values, *after, _PORTION),
            )
        rows = sorted(rows, key=lambda row: row[:2])[:_PORTION]
        if not rows:
            return
        for died_at, row, reason, stage, attempt, enqueued_at, generation, body, attributes in rows:
            yield DeadLetter(
                message_id=queue.id_of(row),
                body=body or b"",
                properties=_attributes(attributes),
                reason=reason,
                stage=stage,
                attempt=attempt,
                enqueued_at=_instant(enqueued_at),
                died_at=_instant(died_at),
                generation=generation,
                origin=queue.name,
                original_id=queue.id_of(row),
            )
        after = rows[-1][:2]


def _attributes(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {"unreadable": raw.decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"attributes": value}


def _instant(micros: int) -> datetime:
    """Reads a timestamp; 1970 where another program wrote what is none."""
    try:
        return from_micros(micros)
    except OverflowError:
        return from_micros(0)


def requeue(queue: OpenQueue, choice: Choice, ready_at: int) -> Moved:
    """Makes dead letters messages again, on their first attempt."""
    return _moved(
        queue,
        choice,
        "INSERT INTO messages (id, queue, enqueued_at, ready_at, deliveries)"
        f" SELECT id, queue, enqueued_at, {ready_at:d}, deliveries FROM dead WHERE {{}}",
    )


def purge(queue: OpenQueue, choice: Choice) -> Moved:
    """Deletes dead letters for good."""
    bodies = "DELETE FROM bodies WHERE id IN (SELECT id FROM dead WHERE {})"
    return _moved(queue, choice, bodies)


def _moved(queue: OpenQueue, choice: Choice, statement: str) -> Moved:
    """Carries out a statement on dead letters, which then are none any more."""
    moved: set[int] = set()
    with transaction(queue.db):
        for chosen, values in _chosen(queue, choice):
            rows = queue.db.execute(f"SELECT id FROM dead WHERE {chosen}", values)
            moved.update(row for (row,) in rows)
            queue.db.execute(statement.format(chosen), values)
            queue.db.execute(f"DELETE FROM dead WHERE {chosen}", values)
    unknown = [key for key in choice.ids or () if queue.row_of(key) not in moved]
    return Moved(len(moved), tuple(sorted(unknown)))


def _chosen(queue: OpenQueue, choice: Choice) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Conditions that choose dead letters of a queue, each once, and their values."""
    parts = [f"queue = {queue.id:d}"]
    values: list[Any] = []
    for part, value in (
        ("instr(reason, ?) > 0", choice.reason or None),
        ("stage = ?", choice.stage or None),
        ("died_at >= ?", choice.since and to_micros(choice.since)),
        ("died_at < ?", choice.until and to_micros(choice.until)),
    ):
        if value is not None:
            parts.append(part)
            values.append(value)
    condition = " AND ".join(parts)
    if choice.ids is None:
        yield condition, tuple(values)
        return
    rows = {row for row in map(queue.row_of, choice.ids) if row is not None}
    for first, last in ranges(list(rows)):
        yield f"{condition} AND id BETWEEN {first:d} AND {last:d}", tuple(values)
