"""Leases ready messages, and carries out verdicts, with one transaction per call.

Verdicts are read before the transaction, which locks out other writers.  A lease that has ended is
never settled again: its stored report is returned.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Delivery, Entry, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import MAX_REASON, Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed, ProducerError
from airflow_broadway.core.model.acks import NO_ACK, AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import cut, pluralize
from airflow_broadway.producers.engine.plan import plan_of
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.sqlite.database import (
    OpenQueue,
    from_micros,
    ranges,
    transaction,
)

log = logging.getLogger(__name__)

_FOREIGN_ID = "its id is not of this queue; a transformer must keep the message_id"

#: Seconds for which the report of an ended lease is kept.
RETENTION: Final = 7 * 86_400.0
#: The longest delay, in seconds: some 300 years.
MAX_DELAY = 1e10

#: The file stores indexes into this tuple: never change the order.
_ACTIONS = (Action.ACK, Action.RETRY, Action.DEAD_LETTER, Action.LEAVE, Action.RELEASE)

_CHOSEN = "WHERE id BETWEEN :first AND :last"
_RELEASE = "UPDATE messages SET lease = NULL, giver = :lease"
_HELD: Final = "SELECT id FROM messages WHERE lease = ? AND id BETWEEN ? AND ?"
_SETTLED_NOW: Final = """SELECT message, action FROM settled
    WHERE lease = ? AND message BETWEEN ? AND ?"""
#: Action → the statements that carry it out on a range of messages.
_STATEMENTS: Final = {
    Action.ACK: [f"DELETE FROM bodies {_CHOSEN}", f"DELETE FROM messages {_CHOSEN}"],
    Action.RETRY: [f"{_RELEASE}, attempt = attempt + 1, ready_at = :now + :delay {_CHOSEN}"],
    Action.DEAD_LETTER: [  # the body stays in its table
        # Values that another program wrote may have any type.
        f"""INSERT INTO dead SELECT id, queue, CAST(enqueued_at AS INTEGER),
        max(1, CAST(attempt AS INTEGER)), CAST(deliveries AS INTEGER), :stage, :reason, :now,
        :generation FROM messages {_CHOSEN}""",
        f"DELETE FROM messages {_CHOSEN}",
    ],
    Action.LEAVE: [f"{_RELEASE}, ready_at = :left_until {_CHOSEN}"],
    Action.RELEASE: [f"{_RELEASE} {_CHOSEN}"],
}


def micros_of(seconds: float) -> int:
    """Converts a delay to microseconds; negative ones and NaN count as 0."""
    return round(min(seconds, MAX_DELAY) * 1_000_000) if seconds > 0 else 0


# -- receiving -------------------------------------------------------------------------------------


def messages_of(
    queue: OpenQueue, generation: str, rows: list[tuple[Any, ...]], position: int, at: datetime
) -> tuple[list[Message], dict[int, str]]:
    """Converts rows to messages; returns also the errors of malformed ones, by row."""
    prefix = queue.tag + "-"
    unread: dict[int, str] = {}
    acknowledger = AckRef(NO_ACK.acknowledger, generation, Delivery())
    messages = []
    for row, body, attributes, enqueued_at, attempt, deliveries in rows:
        try:
            metadata: dict[str, Any] = {
                "queue": queue.name,
                "enqueued_at": _isoformat(enqueued_at),
            }
            if attributes is not None:
                metadata["attributes"] = json.loads(attributes)
            redelivered, size = deliveries > 0, len(body)
            if type(attempt) is not int:
                raise TypeError(f"its attempt is {attempt!r}")
        except Exception as error:  # a malformed row of another program fails alone
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
                received_at=at,
                position=position,
                size=size,
            )
        )
        position += 1
    return messages, unread


@lru_cache(maxsize=64)
def _isoformat(micros: int) -> str:
    return from_micros(micros).isoformat()


def set_aside(queue: OpenQueue, rows: Mapping[int, str], generation: str, now: int) -> None:
    """Dead-letters messages that cannot be read, inside a transaction.

    :param rows: Row → reason.
    """
    for row, reason in rows.items():
        dead = Verdict(Action.DEAD_LETTER, 0.0, reason[:500], "receive")
        _carry_out(queue, 0, generation, {dead: [row]}, now, now)


def open_lease(queue: OpenQueue, generation: str) -> int | None:
    """Returns the row of the generation's lease; ``None`` if it has received nothing yet."""
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


# -- settling --------------------------------------------------------------------------------------


def settle(
    queue: OpenQueue,
    generation: str,
    settlement: Settlement,
    now: int,
    *,
    state: str = "settled",
) -> SettleReport:
    """Carries out all verdicts on a lease and ends it; repeated calls return its report."""
    entries, guard = _by_id(queue, settlement.entries())
    if guard.refused and settlement.everything is None:  # settlement.rest would apply to them
        raise ProducerError(
            f"{pluralize(len(guard.refused), 'verdict')} of generation {generation!r} for message"
            " ids that are not of this queue: nothing was settled, and all are redelivered when the"
            " lease lapses; a transformer must keep the message_id"
        )
    with transaction(queue.db):
        lease = queue.db.execute(
            "SELECT id, state, deadline, report, received FROM leases"
            " WHERE queue = ? AND generation = ?",
            (queue.id, generation),
        ).fetchone()
        if lease is None:
            lapsed = max(len(entries), settlement.expected or 0)
            report = SettleReport(lapsed=lapsed, again=ComingAgain(all_but=True))
            # The ended lease prevents the generation from receiving later.
            _end(queue, new_lease(queue, generation, now, {}, 0.0), state, now, report)
            return report
        lease_id, old_state, deadline, stored, received = lease
        settled = _settled_now(queue, (lease_id, 0, 2**63 - 1))
        early = {queue.id_of(row): action for row, action in settled.items()}
        reported = report_of(early.values())
        unreported = beyond(reported, settlement)
        if old_state != "open":
            report = SettleReport.from_json(json.loads(stored))
            again = ComingAgain.of(early, whole=False)
            return report if old_state != "lapsed" else replace(report + unreported, again=again)
        rows = queue.db.execute("SELECT id FROM messages WHERE lease = ? ORDER BY id", (lease_id,))
        held = {queue.id_of(row): row for (row,) in rows}
        # Messages in the settlement that the lease never received; negative: the reverse.
        missing = 0
        if settlement.expected is not None:
            known = settlement.settled_now
            missing = settlement.expected + (0 if known is None else known.total) - received
        lost = received - len(held) - reported.total
        # Equal counts may hide foreign ids or lost messages.
        sure = not guard.refused and missing == 0 and lost == 0
        plan = plan_of(
            held,
            replace(settlement, entries=lambda: iter(entries.values())),
            at_once=early,
            agree=sure
            or settlement.expected is None
            or (settlement.everything is None and missing >= 0),
        )
        groups: dict[Verdict, list[int]] = {}
        for row, verdict in zip(held.values(), plan.verdicts.values(), strict=True):
            groups.setdefault(verdict, []).append(row)
        _carry_out(queue, lease_id, generation, groups, max(now, deadline), now)
        absent = sum(queue.row_of(key) is not None for key in plan.absent)
        lapsed = max(absent, missing + lost)
        done = {key: verdict.action for key, verdict in plan.verdicts.items()}
        report = report_of(done.values(), lapsed=lapsed, errors=guard.errors()) + unreported
        again = ComingAgain.of({**early, **done}, whole=sure and not lapsed)
        report = replace(report, again=again)
        _end(queue, lease_id, state, now, report)
    return report


def settle_now(
    queue: OpenQueue,
    generation: str,
    entries: Iterable[Entry],
    now: int,
) -> SettleReport:
    """Carries out verdicts on some messages, and keeps the lease open."""
    requested, guard = _by_id(queue, entries)
    rows = {row: key for key in requested if (row := queue.row_of(key)) is not None}
    with transaction(queue.db):
        lease = queue.db.execute(
            "SELECT id, deadline FROM leases WHERE queue = ? AND generation = ?",
            (queue.id, generation),
        ).fetchone()
        done: dict[int, Action] = {}
        if lease is not None:
            lease_id, deadline = lease
            groups: dict[Verdict, list[int]] = {}
            parts = [(lease_id, *part) for part in ranges([*rows])]
            for part in parts:
                for (row,) in queue.db.execute(_HELD, part):
                    groups.setdefault(requested[rows[row]].verdict, []).append(row)
            # Of repeated calls, the first verdict on each message is valid and is reported.
            settled = f"INSERT OR IGNORE INTO settled VALUES ({lease_id:d}, ?, ?)"
            for verdict, group in groups.items():
                code = _ACTIONS.index(verdict.action)
                queue.db.executemany(settled, [(row, code) for row in group])
            _carry_out(queue, lease_id, generation, groups, max(now, deadline), now)
            done = _settled_now(queue, *parts)
    undone = {key for row, key in rows.items() if row not in done}
    report = report_of(
        done.values(), lapsed=len(undone), failed=len(guard.refused), errors=guard.errors()
    )
    return replace(report, undone=frozenset(undone | guard.refused.keys()))


def _settled_now(queue: OpenQueue, *parts: tuple[int, int, int]) -> dict[int, Action]:
    """Returns the actions of ``settle_now``: row → action.

    :param parts: Lease, first and last row of each range.
    """
    rows = chain.from_iterable(queue.db.execute(_SETTLED_NOW, part) for part in parts)
    return {row: _ACTIONS[code] for row, code in rows}


def end_lapsed(queue: OpenQueue, now: int, *, spared: int | None) -> None:
    """Ends every open lease whose deadline has passed, and releases its messages.

    :param spared: A lease to skip, because its holder is receiving.
    """
    lapsed = queue.db.execute(
        "SELECT id FROM leases"
        " WHERE queue = ? AND state = 'open' AND deadline <= ? AND id IS NOT ?",
        (queue.id, now, spared),
    ).fetchall()
    for (lease_id,) in lapsed:
        release = "UPDATE messages SET lease = NULL WHERE lease = ?"
        freed = queue.db.execute(release, (lease_id,)).rowcount
        _end(queue, lease_id, "lapsed", now, SettleReport(lapsed=freed))


def _by_id(queue: OpenQueue, entries: Iterable[Entry]) -> tuple[dict[str, Entry], MessageGuard]:
    """Collects entries by message id, the last one of each; refuses ids of other queues.

    A held message without an entry because of a wrong id is released.
    """
    by_id: dict[str, Entry] = {}
    guard = MessageGuard()
    for entry in entries:
        if queue.row_of(entry.message_id) is None:
            guard.refuse(entry.message_id, _FOREIGN_ID)
        else:
            by_id[entry.message_id] = entry
    return by_id, guard


def _carry_out(
    queue: OpenQueue,
    lease: int,
    generation: str,
    groups: Mapping[Verdict, list[int]],
    left_until: int,
    now: int,
) -> None:
    """Carries out verdicts on messages of a lease, inside a transaction.

    :param left_until: The timestamp at which messages with ``LEAVE`` are redelivered: the lease's
        deadline.
    """
    for verdict, rows in groups.items():
        values = {
            "lease": lease,
            "generation": generation,
            "left_until": left_until,
            "now": now,
            "delay": micros_of(verdict.delay),
            "stage": verdict.stage,
            "reason": cut(verdict.reason, MAX_REASON),
        }
        chosen = [{**values, "first": first, "last": last} for first, last in ranges(rows)]
        for statement in _STATEMENTS[verdict.action]:
            queue.db.executemany(statement, chosen)


def new_lease(
    queue: OpenQueue, generation: str, now: int, owner: Mapping[str, Any], seconds: float
) -> int:
    """Inserts a lease; returns its row."""
    inserted = queue.db.execute(
        "INSERT INTO leases (queue, generation, owner, seconds, deadline, opened_at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (queue.id, generation, json.dumps(dict(owner)), seconds, now, now),
    )
    return inserted.lastrowid or 0


def _end(queue: OpenQueue, lease: int, state: str, now: int, report: SettleReport) -> None:
    """Ends a lease, and deletes leases that ended before the retention."""
    queue.db.execute(
        "UPDATE leases SET state = ?, ended_at = ?, report = ? WHERE id = ?",
        (state, now, json.dumps(report.to_json()), lease),
    )
    old = (now - micros_of(RETENTION),)
    settled = "DELETE FROM settled WHERE lease IN (SELECT id FROM leases WHERE ended_at < ?)"
    queue.db.execute(settled, old)
    queue.db.execute("DELETE FROM leases WHERE ended_at < ?", old)
