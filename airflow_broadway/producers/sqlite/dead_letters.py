"""Dead letters: messages set aside with the reason of their last failure.

They lie in the queue's own file: one transaction sends them back, or deletes them, so that each is
in exactly one place whoever is killed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter
from airflow_broadway.producers.sqlite.database import transaction
from airflow_broadway.producers.sqlite.records import QueueRow, from_micros, ranges, to_micros

__all__ = ["among", "letters", "purge", "reasons", "requeue", "set_aside"]


def set_aside(db: sqlite3.Connection, rows: Mapping[int, str], generation: str, now: int) -> None:
    """Make dead letters of messages that cannot be read; inside a transaction.

    :param rows: Row → reason.
    """
    for row, reason in rows.items():
        db.execute(
            "INSERT INTO dead SELECT id, queue,"
            " CASE typeof(enqueued_at) WHEN 'integer' THEN enqueued_at ELSE 0 END,"
            " CASE typeof(attempt) WHEN 'integer' THEN attempt ELSE 1 END,"
            " CASE typeof(deliveries) WHEN 'integer' THEN deliveries ELSE 0 END,"
            " 'secure', ?, ?, ? FROM messages WHERE id = ?",
            (reason[:500], now, generation, row),
        )
        db.execute("DELETE FROM messages WHERE id = ?", (row,))


def letters(
    db: sqlite3.Connection,
    queue: QueueRow,
    name: str,
    choice: Choice,
    limit: int | None,
    offset: int,
    after: DeadLetter | None,
) -> list[DeadLetter]:
    """Dead letters of the queue, in order of their death.

    :param name: The queue's.
    :param after: Only those behind this one.
    """
    found: list[tuple[Any, ...]] = []
    for chosen, values in _chosen(queue, choice):
        if after is not None:
            assert after.died_at is not None
            row = queue.row_of(after.message_id)
            chosen += " AND (died_at, id) > (?, ?)"
            values = (*values, to_micros(after.died_at), row)
        most = -1 if limit is None else limit + offset
        found += db.execute(
            "SELECT died_at, id, reason, stage, attempt, enqueued_at, generation FROM dead"
            f" WHERE {chosen} ORDER BY died_at, id LIMIT ?",
            (*values, most),
        ).fetchall()
    found.sort()
    found = found[offset:] if limit is None else found[offset : offset + limit]
    return [_letter(db, queue, name, *each) for each in found]


def _letter(
    db: sqlite3.Connection,
    queue: QueueRow,
    name: str,
    died_at: int,
    row: int,
    reason: str,
    stage: str,
    attempt: int,
    enqueued_at: int,
    generation: str,
) -> DeadLetter:
    body, attributes = db.execute(
        "SELECT CAST(body AS BLOB), CAST(attributes AS BLOB) FROM bodies WHERE id = ?", (row,)
    ).fetchone() or (None, None)
    return DeadLetter(
        message_id=f"{queue.tag}-{row}",
        body=body or b"",
        properties=_attributes(attributes),
        reason=reason,
        stage=stage,
        attempt=attempt,
        enqueued_at=_instant(enqueued_at),
        died_at=_instant(died_at),
        generation=generation,
        origin=name,
        original_id=f"{queue.tag}-{row}",
    )


def reasons(db: sqlite3.Connection, queue: QueueRow) -> list[tuple[str, str, int]]:
    """(reason, stage, count), the most frequent first."""
    return db.execute(
        "SELECT reason, stage, COUNT(*) FROM dead WHERE queue = ?"
        " GROUP BY reason, stage ORDER BY COUNT(*) DESC, reason, stage",
        (queue.id,),
    ).fetchall()


def among(db: sqlite3.Connection, queue: QueueRow, choice: Choice) -> set[str]:
    """The ids of those that are chosen."""
    return {
        f"{queue.tag}-{row}"
        for chosen, values in _chosen(queue, choice)
        for (row,) in db.execute(f"SELECT id FROM dead WHERE {chosen}", values)
    }


def _attributes(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {"unreadable": raw.decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"attributes": value}


def _instant(micros: int) -> datetime:
    """The instant; 1970 where another program wrote what is none."""
    try:
        return from_micros(micros)
    except OverflowError:
        return from_micros(0)


def requeue(db: sqlite3.Connection, queue: QueueRow, choice: Choice, ready_at: int) -> int:
    """Make dead letters messages again, on their first attempt; return how many."""
    count = 0
    with transaction(db):
        for chosen, values in _chosen(queue, choice):
            db.execute(
                "INSERT INTO messages (id, queue, enqueued_at, ready_at, deliveries)"
                f" SELECT id, queue, enqueued_at, {ready_at:d}, deliveries FROM dead"
                f" WHERE {chosen}",
                values,
            )
            count += db.execute(f"DELETE FROM dead WHERE {chosen}", values).rowcount
    return count


def purge(db: sqlite3.Connection, queue: QueueRow, choice: Choice) -> int:
    """Delete dead letters for good; return how many."""
    count = 0
    with transaction(db):
        for chosen, values in _chosen(queue, choice):
            db.execute(
                f"DELETE FROM bodies WHERE id IN (SELECT id FROM dead WHERE {chosen})", values
            )
            count += db.execute(f"DELETE FROM dead WHERE {chosen}", values).rowcount
    return count


def _chosen(queue: QueueRow, choice: Choice) -> Iterator[tuple[str, tuple[Any, ...]]]:
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
