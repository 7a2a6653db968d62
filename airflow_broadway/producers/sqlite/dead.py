"""Dead letters: messages set aside with the reason of their last failure."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator

from airflow_broadway.producers.sqlite.database import transaction
from airflow_broadway.producers.sqlite.records import DeadLetter, QueueRow, from_micros, ranges

__all__ = ["letters", "purge", "requeue"]


def letters(
    db: sqlite3.Connection, queue: QueueRow, limit: int | None, offset: int
) -> list[DeadLetter]:
    """The queue's dead letters, in order of their death."""
    rows = db.execute(
        "SELECT d.id, b.body, b.attributes, d.reason, d.stage, d.attempt, d.enqueued_at,"
        " d.died_at, d.generation FROM dead d JOIN bodies b ON b.id = d.id"
        " WHERE d.queue = ? ORDER BY d.died_at, d.id LIMIT ? OFFSET ?",
        (queue.id, -1 if limit is None else limit, offset),
    )
    return [
        DeadLetter(
            f"{queue.tag}-{row}",
            body,
            {} if attributes is None else json.loads(attributes),
            reason,
            stage,
            attempt,
            from_micros(enqueued_at),
            from_micros(died_at),
            generation,
        )
        for row, body, attributes, reason, stage, attempt, enqueued_at, died_at, generation in (
            rows
        )
    ]


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
