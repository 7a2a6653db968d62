"""Dead letters: messages set aside with the reason of their last failure."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from airflow_broadway.producers.sqlite.database import transaction
from airflow_broadway.producers.sqlite.records import DeadLetter, QueueRow, from_micros, ranges

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
    db: sqlite3.Connection, queue: QueueRow, limit: int | None, offset: int
) -> list[DeadLetter]:
    """The queue's dead letters, in order of their death."""
    rows = db.execute(
        "SELECT d.id, CAST(b.body AS BLOB), CAST(b.attributes AS BLOB), d.reason, d.stage,"
        " d.attempt, d.enqueued_at, d.died_at, d.generation"
        " FROM dead d LEFT JOIN bodies b ON b.id = d.id"
        " WHERE d.queue = ? ORDER BY d.died_at, d.id LIMIT ? OFFSET ?",
        (queue.id, -1 if limit is None else limit, offset),
    )
    return [
        DeadLetter(
            f"{queue.tag}-{row}",
            body or b"",
            _attributes(attributes),
            reason,
            stage,
            attempt,
            _instant(enqueued_at),
            _instant(died_at),
            generation,
        )
        for row, body, attributes, reason, stage, attempt, enqueued_at, died_at, generation in (
            rows
        )
    ]


def reasons(db: sqlite3.Connection, queue: QueueRow) -> list[tuple[str, str, int]]:
    """(reason, stage, count), the most frequent first."""
    return db.execute(
        "SELECT reason, stage, COUNT(*) FROM dead WHERE queue = ?"
        " GROUP BY reason, stage ORDER BY COUNT(*) DESC, reason, stage",
        (queue.id,),
    ).fetchall()


def among(db: sqlite3.Connection, queue: QueueRow, message_ids: Iterable[str]) -> set[str]:
    """Those of some ids that are dead letters of the queue."""
    return {
        f"{queue.tag}-{row}"
        for chosen in _chosen(queue, message_ids)
        for (row,) in db.execute(f"SELECT id FROM dead WHERE {chosen}")
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


def requeue(
    db: sqlite3.Connection, queue: QueueRow, message_ids: Iterable[str] | None, ready_at: int
) -> int:
    """Make dead letters messages again, on their first attempt; return how many."""
    count = 0
    with transaction(db):
        for chosen in _chosen(queue, message_ids):
            db.execute(
                "INSERT INTO messages (id, queue, enqueued_at, ready_at, deliveries)"
                f" SELECT id, queue, enqueued_at, {ready_at:d}, deliveries FROM dead"
                f" WHERE {chosen}"
            )
            count += db.execute(f"DELETE FROM dead WHERE {chosen}").rowcount
    return count


def purge(db: sqlite3.Connection, queue: QueueRow, message_ids: Iterable[str] | None) -> int:
    """Delete dead letters for good; return how many."""
    count = 0
    with transaction(db):
        for chosen in _chosen(queue, message_ids):
            db.execute(f"DELETE FROM bodies WHERE id IN (SELECT id FROM dead WHERE {chosen})")
            count += db.execute(f"DELETE FROM dead WHERE {chosen}").rowcount
    return count


def _chosen(queue: QueueRow, message_ids: Iterable[str] | None) -> Iterator[str]:
    """Conditions that choose all dead letters of a queue, or those of some ids, each once."""
    everything = f"queue = {queue.id:d}"
    if message_ids is None:
        yield everything
        return
    rows = {row for row in map(queue.row_of, message_ids) if row is not None}
    for first, last in ranges(list(rows)):
        yield f"{everything} AND id BETWEEN {first:d} AND {last:d}"
