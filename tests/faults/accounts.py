"""Counts what became of the messages of killed runs.

From two witnesses that are not ours: the broker's own queues, and what ``handle_batch`` wrote down
of its inputs.  Our reports must then agree with them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults.broker import Broker, Dead
from tests.faults.dags import killed_pipeline as truth
from tests.faults.found import Found


def account(
    found: Found, broker: Broker, numbers: range, handled: str, staging: Path, runs: int
) -> None:
    """Adds to what was found what is to be counted in the end.

    :param numbers: Those of the messages.
    :param handled: The file of what ``handle_batch`` got.
    :param staging: Where the runs' reports are.
    :param runs: How many runs there were.
    """
    if broker.waiting() or broker.leased():
        found.mistakes.append(f"{broker.waiting()} messages and {broker.leased()} leases are left")
    letters = broker.dead()
    calls = truth.noted(handled)
    dead = Counter(letter.number for letter in letters)
    done = {call.number for call in calls if not truth.fails_in_batch(call.number, call.attempt)}
    for number in numbers:
        if not (dead[number] if truth.dies(number) else number in done):
            found.lost.append(number)
    found.mistakes += [
        f"message {number} is a dead letter, and should not be"
        for number in dead
        if not truth.dies(number)
    ][:10]
    _count_letters(found, letters)
    _count_repeats(found, calls, stable_ids=broker.stable_ids)
    _check_attempts(found, calls, letters)
    _check_reports(found, staging, runs, dead, exact=broker.stable_ids)


def _count_letters(found: Found, letters: Sequence[Dead]) -> None:
    """Of several dead letters of a message, all but the first must be marked as repeated."""
    copies: dict[int, list[bool]] = {}
    for letter in letters:
        copies.setdefault(letter.number, []).append(letter.marked)
    for marks in copies.values():
        found.duplicates += len(marks) - 1
        found.unmarked += max(0, marks.count(False) - 1)


def _count_repeats(found: Found, calls: Sequence[truth.Handled], *, stable_ids: bool) -> None:
    """Inputs of ``handle_batch`` beyond the first of one message and attempt.

    Each must be marked, or be under a batch id that the message had before.
    """
    seen: set[tuple[int, int]] = set()
    batches: dict[int, set[str]] = {}
    ids: dict[int, str] = {}
    for call in calls:
        if ids.setdefault(call.number, call.message_id) != call.message_id and stable_ids:
            found.mistakes.append(f"message {call.number} has two ids")
        before = batches.setdefault(call.number, set())
        found.duplicates += (call.number, call.attempt) in seen
        found.unmarked += bool(before) and not call.redelivered and call.batch_id not in before
        seen.add((call.number, call.attempt))
        before.add(call.batch_id)


def _check_attempts(found: Found, calls: Sequence[truth.Handled], letters: Sequence[Dead]) -> None:
    """The death of a task uses up no attempt."""
    used: dict[int, int] = {}
    for call in calls:
        used[call.number] = max(used.get(call.number, 0), call.attempt)
    used |= {letter.number: letter.attempt for letter in letters}
    wrong = [number for number, count in used.items() if count != truth.attempts(number)]
    if wrong:
        found.mistakes.append(f"messages {wrong[:10]} used a wrong number of attempts")


def _check_reports(
    found: Found, staging: Path, runs: int, dead: Counter[int], *, exact: bool
) -> None:
    """Our own reports must balance, and agree with the queue.

    :param exact: Whether every message ends once; else what was counted as a duplicate may have
        ended as often.
    """
    totals: Counter[str] = Counter()
    reports = sorted(staging.rglob("report.json"))
    for path in reports:
        report = json.loads(path.read_text())
        totals.update(report["totals"])
        if not report["balanced"]:
            found.mistakes.append(f"{path} does not balance: {report['totals']}")
    if len(reports) != runs:
        found.mistakes.append(f"{runs} runs left {len(reports)} reports")
    for name, count in (("dead_lettered", len(dead)), ("acked", found.messages - len(dead))):
        more = 0 if exact else found.duplicates
        if not count <= totals[name] <= count + more:
            found.mistakes.append(f"the reports say {totals[name]} {name}, the queue says {count}")
