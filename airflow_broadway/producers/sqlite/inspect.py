"""Looking at a queue without changing it: its depth, its leases."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from airflow_broadway.core.custody.protocol import Lease, QueueDepth
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.producers.sqlite.database import transaction
from airflow_broadway.producers.sqlite.records import LeaseRecord, QueueRow, from_micros
from airflow_broadway.producers.sqlite.settling import settled_early

__all__ = ["depth", "leases"]

_LEASED = """SELECT COUNT(*), MIN(enqueued_at) FROM messages WHERE lease IN
    (SELECT id FROM leases WHERE queue = :queue AND state = 'open' AND deadline {} :now)"""


def depth(db: sqlite3.Connection, queue: QueueRow, now: int) -> QueueDepth:
    """How full the queue is; what a lapsed lease held counts as ready."""
    values = {"queue": queue.id, "now": now}
    with transaction(db, "DEFERRED"):
        free, ready, oldest = db.execute(
            "SELECT COUNT(*), COALESCE(SUM(ready_at <= :now), 0),"
            " MIN(CASE WHEN ready_at <= :now THEN enqueued_at END)"
            " FROM messages WHERE queue = :queue AND lease IS NULL",
            values,
        ).fetchone()
        lapsed, oldest_lapsed = db.execute(_LEASED.format("<="), values).fetchone()
        leased, _ = db.execute(_LEASED.format(">"), values).fetchone()
        dead = db.execute("SELECT COUNT(*) FROM dead WHERE queue = ?", (queue.id,)).fetchone()[0]
    known = [instant for instant in (oldest, oldest_lapsed) if instant is not None]
    age = max(0.0, (now - min(known)) / 1_000_000) if known else None
    return QueueDepth(ready + lapsed, free - ready, leased, dead, age)


def leases(
    db: sqlite3.Connection, queue: QueueRow, lease_of: dict[str, Any], *, ended: bool
) -> list[LeaseRecord]:
    """The leases on record, oldest first; the ended ones only if asked for.

    :param lease_of: What all leases of this queue have in common.
    """
    chosen = "" if ended else "AND state = 'open'"
    with transaction(db, "DEFERRED"):
        rows = db.execute(
            "SELECT id, generation, owner, seconds, deadline, state, received, opened_at, ended_at,"
            f" report FROM leases WHERE queue = ? {chosen} ORDER BY id",
            (queue.id,),
        ).fetchall()
        return [_record(db, row, lease_of) for row in rows]


def _owner(text: str) -> dict[str, Any]:
    """Who holds a lease; nobody that is known, where another program wrote it."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _record(db: sqlite3.Connection, row: tuple[Any, ...], lease_of: dict[str, Any]) -> LeaseRecord:
    key, generation, owner, seconds, deadline, state, received, opened, ended, report = row
    held = db.execute("SELECT COUNT(*) FROM messages WHERE lease = ?", (key,)).fetchone()[0]
    return LeaseRecord(
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
        opened_at=from_micros(opened),
        ended_at=None if ended is None else from_micros(ended),
        settled_early=settled_early(db, key),
        report=None if report is None else SettleReport.from_json(json.loads(report)),
    )
