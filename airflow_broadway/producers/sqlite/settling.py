"""How the embedded queue carries out verdicts: in one transaction, whatever their number.

Verdicts are read before the transaction, which locks out other writers.  A lease that has ended is
never settled again: its report is kept, and returned once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import MAX_REASON, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import cut, many
from airflow_broadway.producers.engine.plan import plan_of
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.sqlite.database import OpenQueue, ranges, transaction

_STRANGER = "its id is not of this queue; a transformer must keep the message_id"

#: The longest delay, in seconds: some 300 years.
MAX_DELAY = 1e10

# Never renumber: the numbers are kept in the file.
_CODES = {
    Action.ACK: 0,
    Action.RETRY: 1,
    Action.DEAD_LETTER: 2,
    Action.LEAVE: 3,
    Action.RELEASE: 4,
}
_ACTIONS = {code: action for action, code in _CODES.items()}

_CHOSEN = "WHERE id BETWEEN :first AND :last"
_RELEASE = "UPDATE messages SET lease = NULL, giver = :lease"
#: The statements that carry out an action on a range of messages.
_STATEMENTS: Final = {
    Action.ACK: [f"DELETE FROM bodies {_CHOSEN}", f"DELETE FROM messages {_CHOSEN}"],
    Action.RETRY: [f"{_RELEASE}, attempt = attempt + 1, ready_at = :now + :delay {_CHOSEN}"],
    Action.DEAD_LETTER: [  # its body stays
        f"""INSERT INTO dead SELECT id, queue, enqueued_at, attempt, deliveries, :stage, :reason,
        :now, :generation FROM messages {_CHOSEN}""",
        f"DELETE FROM messages {_CHOSEN}",
    ],
    Action.LEAVE: [f"{_RELEASE}, ready_at = :left_until {_CHOSEN}"],
    Action.RELEASE: [f"{_RELEASE} {_CHOSEN}"],
}


def micros_of(seconds: float) -> int:
    """A verdict's delay in microseconds; what is no delay counts as none."""
    return round(min(seconds, MAX_DELAY) * 1_000_000) if seconds > 0 else 0


def settle(
    queue: OpenQueue,
    generation: str,
    settlement: Settlement,
    now: int,
    *,
    state: str = "settled",
) -> SettleReport:
    """Carries out all verdicts on a lease and ends it; a second time, only reports."""
    entries, guard = _own(queue, settlement.entries())
    if guard.refused and settlement.everything is None:  # their verdicts would fall to the rest
        raise ProducerError(
            f"{many(len(guard.refused), 'verdict')} of generation {generation!r} for message ids"
            " that are not of this queue: nothing was settled, and all comes back when the lease"
            " lapses; a transformer must keep the message_id"
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
            # A late holder cannot begin to receive.
            _end(queue, new_lease(queue, generation, now), state, now, report)
            return report
        lease_id, was, deadline, kept, received = lease
        early = {queue.id_of(row): action for row, action in settled_now(queue, lease_id).items()}
        reported = report_of(early.values())
        unreported = beyond(reported, settlement)
        if was != "open":
            report = SettleReport.from_json(json.loads(kept))
            again = ComingAgain.of(early, whole=False)
            return report if was != "lapsed" else replace(report + unreported, again=again)
        rows = queue.db.execute("SELECT id FROM messages WHERE lease = ? ORDER BY id", (lease_id,))
        held = {queue.id_of(row): row for (row,) in rows}
        missing = _missing(settlement, received)
        lost = received - len(held) - reported.total
        # Equal counts may hide that some are strangers, or lost.
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
        gone = sum(queue.row_of(key) is not None for key in plan.gone)
        lapsed = max(gone, missing + lost)
        done = {key: verdict.action for key, verdict in plan.verdicts.items()}
        report = report_of(done.values(), lapsed=lapsed, errors=guard.errors()) + unreported
        again = ComingAgain.of({**early, **done}, whole=sure and not lapsed)
        report = replace(report, again=again)
        _end(queue, lease_id, state, now, report)
    return report


def _missing(settlement: Settlement, received: int) -> int:
    """Messages that the settlement knows of and the lease never received; below 0: the reverse."""
    if settlement.expected is None:
        return 0
    known = settlement.settled_now
    return settlement.expected + (0 if known is None else known.total) - received


def settle_now(
    queue: OpenQueue,
    generation: str,
    entries: Iterable[Entry],
    now: int,
) -> SettleReport:
    """Carries out verdicts on some messages of a lease, which goes on."""
    requested, guard = _own(queue, entries)
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
            for first, last in ranges([*rows]):
                held = "SELECT id FROM messages WHERE lease = ? AND id BETWEEN ? AND ?"
                for (row,) in queue.db.execute(held, (lease_id, first, last)):
                    groups.setdefault(requested[rows[row]].verdict, []).append(row)
            # What the second of two equal calls reports, the first verdict on each message.
            queue.db.executemany(
                f"INSERT OR IGNORE INTO settled VALUES ({lease_id:d}, ?, ?)",
                [(row, _CODES[v.action]) for v, some in groups.items() for row in some],
            )
            _carry_out(queue, lease_id, generation, groups, max(now, deadline), now)
            for first, last in ranges([*rows]):
                done |= settled_now(queue, lease_id, first, last)
    undone = {key for row, key in rows.items() if row not in done}
    report = report_of(
        done.values(), lapsed=len(undone), failed=len(guard.refused), errors=guard.errors()
    )
    return replace(report, undone=frozenset(undone | guard.refused.keys()))


def settled_now(
    queue: OpenQueue, lease: int, first: int = 0, last: int = 2**63 - 1
) -> dict[int, Action]:
    """Returns what ``settle_now`` did under a lease with the messages of a range: row → action."""
    query = "SELECT message, action FROM settled WHERE lease = ? AND message BETWEEN ? AND ?"
    return {row: _ACTIONS[code] for row, code in queue.db.execute(query, (lease, first, last))}


def end_lapsed(queue: OpenQueue, now: int, *, spared: int | None) -> None:
    """Ends every open lease whose deadline has passed: its messages are ready again.

    :param spared: A lease to leave as it is, because its holder is at work this moment.
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


def _own(queue: OpenQueue, entries: Iterable[Entry]) -> tuple[dict[str, Entry], MessageGuard]:
    """Reads entries, the later of two on one message; refuses those that are not of this queue.

    What is held under the id that they should name has no verdict then, and is released.
    """
    own: dict[str, Entry] = {}
    guard = MessageGuard()
    for entry in entries:
        if queue.row_of(entry.message_id) is None:
            guard.refuse(entry.message_id, _STRANGER)
        else:
            own[entry.message_id] = entry
    return own, guard


def _carry_out(
    queue: OpenQueue,
    lease: int,
    generation: str,
    groups: Mapping[Verdict, list[int]],
    left_until: int,
    now: int,
) -> None:
    """Carries out verdicts on messages of a lease, inside a transaction.

    :param left_until: When what is left to the queue's own rule is delivered again: when the lease
        would have lapsed.
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
    queue: OpenQueue,
    generation: str,
    now: int,
    *,
    owner: Mapping[str, Any] | None = None,
    seconds: float = 0.0,
) -> int:
    """Opens a lease; returns its row."""
    queue.db.execute(
        "INSERT INTO leases (queue, generation, owner, seconds, deadline, opened_at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (queue.id, generation, json.dumps(dict(owner or {})), seconds, now, now),
    )
    return int(queue.db.execute("SELECT last_insert_rowid()").fetchone()[0])


def _end(queue: OpenQueue, lease: int, state: str, now: int, report: SettleReport) -> None:
    queue.db.execute(
        "UPDATE leases SET state = ?, ended_at = ?, report = ? WHERE id = ?",
        (state, now, json.dumps(report.to_json()), lease),
    )
