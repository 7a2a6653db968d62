"""How the embedded queue carries out verdicts: in one transaction, whatever their number.

The exceptions of a settlement are first streamed into a temporary table, which takes no lock; then
each action is a few statements over that table, and the verdict on the rest a few more.  A lease
that has ended is never settled again: its report is kept, and given once more.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, MAX_REASON, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import cut, many
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.sqlite.database import QueueRow, transaction

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
_AGAIN = f"({', '.join(str(_CODES[action]) for action in sorted(COMES_AGAIN))})"

_ENTRIES = """CREATE TEMP TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY, action INTEGER, delay INTEGER, stage TEXT, reason TEXT
)"""
_ENTRY_OF = "(SELECT {} FROM temp.entries WHERE entries.id = messages.id)"


def micros_of(seconds: float) -> int:
    """A verdict's delay in microseconds; what is no delay counts as none."""
    return round(min(seconds, MAX_DELAY) * 1_000_000) if seconds > 0 else 0


def settle(
    db: sqlite3.Connection,
    queue: QueueRow,
    generation: str,
    settlement: Settlement,
    now: int,
    *,
    state: str = "settled",
) -> SettleReport:
    """Carry out all verdicts on a lease and end it; a second time, only report."""
    guard = _load(db, queue, settlement.entries())
    if guard.refused and settlement.everything is None:  # their verdicts would fall to the rest
        raise ProducerError(
            f"{many(len(guard.refused), 'verdict')} of generation {generation!r} for message ids"
            " that are not of this queue: nothing was settled, and all comes back when the lease"
            " lapses; a transformer must keep the message_id"
        )
    with transaction(db):
        lease = db.execute(
            "SELECT id, state, deadline, report, received FROM leases"
            " WHERE queue = ? AND generation = ?",
            (queue.id, generation),
        ).fetchone()
        if lease is None:
            return _never_opened(db, queue, generation, settlement, now, state)
        lease_id, was, deadline, kept, received = lease
        early = settled_early(db, lease_id)
        unreported = beyond(early, settlement)
        if was != "open":
            report = SettleReport.from_json(json.loads(kept))
            if was != "lapsed":
                return report
            return replace(report + unreported, again=_none_held(db, queue, lease_id))
        work = _Work(db, lease_id, generation, deadline, now)
        held, rest = work.held(), settlement.rest
        missing = _missing(settlement, received)
        lost = received - held - early.total
        # Equal counts may hide that some are strangers, or lost.
        unsure = bool(guard.refused) or missing != 0 or lost != 0
        if settlement.expected is not None and unsure and rest.action is not Action.RELEASE:
            rest = _rest_if_unsure(db, queue, generation, settlement, missing=missing, held=held)
        lapsed = max(work.entries_lapsed(), missing + lost)
        again = work.coming_again(queue, rest, sure=not unsure and not lapsed)
        report = work.entries() + work.rest(rest)
        report += SettleReport(lapsed=lapsed, errors=guard.errors(), again=again) + unreported
        _end(db, lease_id, state, now, report)
    return report


def _missing(settlement: Settlement, received: int) -> int:
    """Messages that the settlement knows of and the lease never received; below 0: the reverse."""
    if settlement.expected is None:
        return 0
    known = settlement.settled_now
    return settlement.expected + (0 if known is None else known.total) - received


def _rest_if_unsure(
    db: sqlite3.Connection,
    queue: QueueRow,
    generation: str,
    settlement: Settlement,
    *,
    missing: int,
    held: int,
) -> Verdict:
    """The verdict on what no entry names, where lease and manifest do not agree.

    What was received and never staged must not be settled as if it had been handled: so all that
    the manifest knows is named, one by one, and the others are given back.

    :raises ProducerError: If the lease holds more than the manifest knows, and that names nothing.
    """
    if settlement.everything is not None:
        _name_all(db, queue, settlement.rest, settlement.everything())
        return RELEASE
    if missing < 0:
        raise ProducerError(
            f"generation {generation!r} holds {many(held, 'message')} and its manifest names"
            f" {settlement.expected}: none was settled, and all come back when the lease lapses"
        )
    return settlement.rest


def settle_now(
    db: sqlite3.Connection,
    queue: QueueRow,
    generation: str,
    entries: Iterable[Entry],
    now: int,
) -> SettleReport:
    """Carry out verdicts on some messages of a lease, which goes on."""
    given = {entry.message_id: entry for entry in entries}
    refused = _load(db, queue, given.values())
    with transaction(db):
        lease = db.execute(
            "SELECT id, deadline FROM leases WHERE queue = ? AND generation = ?",
            (queue.id, generation),
        ).fetchone()
        if lease is None:
            lapsed = len(given) - len(refused.refused)
            return replace(_refused(refused), lapsed=lapsed, undone=frozenset(given))
        work = _Work(db, lease[0], generation, lease[1], now)
        # Written down before anything moves: what the second of two equal calls reports.
        db.execute(
            "INSERT OR IGNORE INTO settled SELECT ?1, id, action FROM temp.entries WHERE EXISTS"
            " (SELECT 1 FROM messages WHERE messages.id = entries.id AND lease = ?1)",
            (lease[0],),
        )
        work.entries()
        named = "message IN (SELECT id FROM temp.entries)"
        report = settled_early(db, lease[0], named)
        rows = db.execute(f"SELECT message FROM settled WHERE lease = ? AND {named}", lease[:1])
        done = {row for (row,) in rows}
    undone = frozenset(each for each in given if queue.row_of(each) not in done)
    lapsed = len(undone) - len(refused.refused)
    return report + _refused(refused) + SettleReport(lapsed=lapsed, undone=undone)


def settled_early(db: sqlite3.Connection, lease: int, condition: str = "TRUE") -> SettleReport:
    """What ``settle_now`` did under a lease."""
    rows = db.execute(
        f"SELECT action, COUNT(*) FROM settled WHERE lease = ? AND {condition} GROUP BY action",
        (lease,),
    )
    return _report(rows)


def end_lapsed(db: sqlite3.Connection, queue: QueueRow, now: int, *, spared: int | None) -> None:
    """End every open lease whose deadline has passed: its messages are ready again.

    :param spared: A lease to leave as it is, because its holder is at work this moment.
    """
    lapsed = db.execute(
        "SELECT id FROM leases"
        " WHERE queue = ? AND state = 'open' AND deadline <= ? AND id IS NOT ?",
        (queue.id, now, spared),
    ).fetchall()
    for (lease_id,) in lapsed:
        freed = db.execute("UPDATE messages SET lease = NULL WHERE lease = ?", (lease_id,)).rowcount
        _end(db, lease_id, "lapsed", now, SettleReport(lapsed=freed))


class _Work:
    """The verdicts on one open lease, inside a transaction."""

    def __init__(
        self, db: sqlite3.Connection, lease: int, generation: str, deadline: int, now: int
    ) -> None:
        self.db = db
        self.values = {
            "lease": lease,
            "generation": generation,
            # Left to the queue's own rule: delivered again when the lease would have lapsed.
            "left_until": max(now, deadline),
            "now": now,
        }

    def held(self) -> int:
        """Messages that the lease holds now."""
        query = "SELECT COUNT(*) FROM messages WHERE lease = :lease"
        return int(self.db.execute(query, self.values).fetchone()[0])

    def entries_lapsed(self) -> int:
        """Entries that name messages which the lease holds no more, and did not settle early."""
        query = """SELECT COUNT(*) FROM temp.entries e
            WHERE NOT EXISTS (SELECT 1 FROM messages m WHERE m.id = e.id AND m.lease = :lease)
            AND NOT EXISTS (SELECT 1 FROM settled s WHERE s.lease = :lease AND s.message = e.id)"""
        return int(self.db.execute(query, self.values).fetchone()[0])

    def coming_again(self, queue: QueueRow, rest: Verdict, *, sure: bool) -> ComingAgain:
        """Which messages will come again, before anything is carried out.

        :param sure: Whether the lease holds, or has settled early, all that it ever had.
        """
        early = f"SELECT message FROM settled WHERE lease = :lease AND action {{}} IN {_AGAIN}"
        if sure and rest.action not in COMES_AGAIN:
            # As nearly always: they are named, and few.
            named = f"SELECT id FROM temp.entries WHERE action IN {_AGAIN}"
            return ComingAgain(self._ids(queue, f"{named} UNION {early.format('')}"))
        action = f"COALESCE({_ENTRY_OF.format('action')}, {_CODES[rest.action]})"
        held = f"SELECT id FROM messages WHERE lease = :lease AND {action} {{}} IN {_AGAIN}"
        final = self._ids(queue, f"{held.format('NOT')} UNION {early.format('NOT')}")
        if sure and 2 * len(final) > self.held():
            return ComingAgain(self._ids(queue, f"{held.format('')} UNION {early.format('')}"))
        return ComingAgain(final, all_but=True)

    def _ids(self, queue: QueueRow, query: str) -> frozenset[str]:
        rows = self.db.execute(query, self.values)
        return frozenset(f"{queue.tag}-{row}" for (row,) in rows)

    def entries(self) -> SettleReport:
        """Carry out the verdicts of the temporary table, each on what the lease holds."""
        report = SettleReport()
        present = self.db.execute("SELECT DISTINCT action FROM temp.entries").fetchall()
        for (code,) in present:
            report += self._carry_out(
                code,
                "lease = :lease AND id IN (SELECT id FROM temp.entries WHERE action = :action)",
                {"action": code},
                delay=_ENTRY_OF.format("delay"),
                stage=_ENTRY_OF.format("stage"),
                reason=_ENTRY_OF.format("reason"),
            )
        return report

    def rest(self, verdict: Verdict) -> SettleReport:
        """Carry out one verdict on all that the lease still holds."""
        return self._carry_out(
            _CODES[verdict.action],
            "lease = :lease",
            {
                "delay": micros_of(verdict.delay),
                "stage": verdict.stage,
                "reason": cut(verdict.reason, MAX_REASON),
            },
            delay=":delay",
            stage=":stage",
            reason=":reason",
        )

    def _carry_out(
        self,
        code: int,
        chosen: str,
        values: dict[str, object],
        *,
        delay: str,
        stage: str,
        reason: str,
    ) -> SettleReport:
        """Carry out one action on the messages of the condition ``chosen``.

        ``delay``, ``stage`` and ``reason`` are expressions in the columns of ``messages``.
        """
        values = {**self.values, **values}
        release = "UPDATE messages SET lease = NULL, giver = :lease"
        if code == _CODES[Action.ACK]:
            self.db.execute(
                f"DELETE FROM bodies WHERE id IN (SELECT id FROM messages WHERE {chosen})", values
            )
            statement = f"DELETE FROM messages WHERE {chosen}"
        elif code == _CODES[Action.RETRY]:
            statement = (
                f"{release}, attempt = attempt + 1, ready_at = :now + {delay} WHERE {chosen}"
            )
        elif code == _CODES[Action.DEAD_LETTER]:
            self.db.execute(
                "INSERT INTO dead SELECT id, queue, enqueued_at, attempt, deliveries,"
                f" {stage}, {reason}, :now, :generation FROM messages WHERE {chosen}",
                values,
            )
            statement = f"DELETE FROM messages WHERE {chosen}"  # its body stays
        elif code == _CODES[Action.LEAVE]:
            statement = f"{release}, ready_at = :left_until WHERE {chosen}"
        else:
            statement = f"{release} WHERE {chosen}"
        return _report([(code, self.db.execute(statement, values).rowcount)])


def _load(db: sqlite3.Connection, queue: QueueRow, entries: Iterable[Entry]) -> MessageGuard:
    """Stream entries into the temporary table; return those that are not of this queue.

    What is held under the id that they should name is in nobody's list then, and given back.
    """
    guard = MessageGuard()

    def rows() -> Iterator[tuple[int, int, int, str, str]]:
        for entry in entries:
            row = queue.row_of(entry.message_id)
            if row is None:
                guard.refuse(entry.message_id, _STRANGER)
                continue
            action, delay, reason, stage = entry.verdict
            yield row, _CODES[action], micros_of(delay), stage, cut(reason, MAX_REASON)

    with transaction(db, "DEFERRED"):  # touches the temporary database alone: no lock
        db.execute(_ENTRIES)
        db.execute("DELETE FROM temp.entries")
        # Of two verdicts on one message, the later one counts.
        db.executemany("INSERT OR REPLACE INTO temp.entries VALUES (?, ?, ?, ?, ?)", rows())
    return guard


def _name_all(
    db: sqlite3.Connection, queue: QueueRow, rest: Verdict, everything: Iterable[Entry]
) -> None:
    """Turn the verdict on the rest into entries: one for each message that has none."""
    action, delay, reason, stage = rest
    values = (_CODES[action], micros_of(delay), stage, cut(reason, MAX_REASON))
    named = (queue.row_of(entry.message_id) for entry in everything)
    db.executemany(
        "INSERT OR IGNORE INTO temp.entries VALUES (?, ?, ?, ?, ?)",
        ((row, *values) for row in named if row is not None),
    )


def _never_opened(
    db: sqlite3.Connection,
    queue: QueueRow,
    generation: str,
    settlement: Settlement,
    now: int,
    state: str,
) -> SettleReport:
    """End a lease that has received nothing, so that a late holder cannot begin to."""
    named = db.execute("SELECT COUNT(*) FROM temp.entries").fetchone()[0]
    lapsed = max(named, settlement.expected or 0)
    report = SettleReport(lapsed=lapsed, again=ComingAgain(all_but=True))
    db.execute(
        "INSERT INTO leases (queue, generation, owner, seconds, deadline, opened_at)"
        " VALUES (?, ?, '{}', 0, ?, ?)",
        (queue.id, generation, now, now),
    )
    lease_id = db.execute("SELECT last_insert_rowid()").fetchone()[0]
    _end(db, lease_id, state, now, report)
    return report


def _none_held(db: sqlite3.Connection, queue: QueueRow, lease: int) -> ComingAgain:
    """Which messages of a lease that has lapsed come again: all but what was settled early."""
    query = f"SELECT message FROM settled WHERE lease = ? AND action NOT IN {_AGAIN}"
    done = frozenset(f"{queue.tag}-{row}" for (row,) in db.execute(query, (lease,)))
    return ComingAgain(done, all_but=True)


def _end(db: sqlite3.Connection, lease: int, state: str, now: int, report: SettleReport) -> None:
    db.execute(
        "UPDATE leases SET state = ?, ended_at = ?, report = ? WHERE id = ?",
        (state, now, json.dumps(report.to_json()), lease),
    )


def _report(counts: Iterable[tuple[int, int]]) -> SettleReport:
    """The report of some actions' codes and counts."""
    return report_of({_ACTIONS[code]: count for code, count in counts})


def _refused(guard: MessageGuard) -> SettleReport:
    return SettleReport(failed=len(guard.refused), errors=guard.errors())
