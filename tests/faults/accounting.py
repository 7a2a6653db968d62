"""Counts the final states of the messages of killed runs.

Compares two sources that are independent of the package's reports: the broker's queues, and the
inputs that ``handle_batch`` recorded.  The reports must agree with both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults.broker import Broker, DeadLetter
from tests.faults.case_result import CaseResult
from tests.faults.dags import killed_pipeline as expected


def check_final_states(
    result: CaseResult, broker: Broker, numbers: range, handled: str, staging: Path, runs: int
) -> None:
    """Adds the losses, duplicates and mistakes at the end of a case to its result.

    :param numbers: The numbers of the messages.
    :param handled: The database of the recorded inputs of ``handle_batch``.
    :param staging: The folder with the runs' reports.
    :param runs: The number of runs.
    """
    if broker.waiting() or broker.leased():
        result.mistakes.append(f"{broker.waiting()} messages and {broker.leased()} leases are left")
    letters = broker.dead_letters()
    calls = expected.read_inputs(handled)
    dead = Counter(letter.number for letter in letters)
    done = {call.number for call in calls if not expected.fails_in_batch(call.number, call.attempt)}
    for number in numbers:
        if not (dead[number] if expected.becomes_dead_letter(number) else number in done):
            result.lost.append(number)
    result.mistakes += [
        f"message {number} was dead-lettered without cause"
        for number in dead
        if not expected.becomes_dead_letter(number)
    ][:10]
    _count_dead_letters(result, letters)
    _count_repeats(result, calls, stable_ids=broker.stable_ids)
    _check_attempts(result, calls, letters)
    _check_reports(result, staging, runs, dead, exact=broker.stable_ids)


def _count_dead_letters(result: CaseResult, letters: Sequence[DeadLetter]) -> None:
    """Checks that all but the first of a message's dead letters are marked as redelivered."""
    copies: dict[int, list[bool]] = {}
    for letter in letters:
        copies.setdefault(letter.number, []).append(letter.marked)
    for marks in copies.values():
        result.duplicates += len(marks) - 1
        result.unmarked += max(0, marks.count(False) - 1)


def _count_repeats(
    result: CaseResult, calls: Sequence[expected.BatchInput], *, stable_ids: bool
) -> None:
    """Counts the inputs of ``handle_batch`` beyond the first of each message and attempt.

    Each repeat must be marked, or have a batch id under which the message was handled before.
    """
    seen: set[tuple[int, int]] = set()
    batches: dict[int, set[str]] = {}
    ids: dict[int, str] = {}
    for call in calls:
        if ids.setdefault(call.number, call.message_id) != call.message_id and stable_ids:
            result.mistakes.append(f"message {call.number} has two ids")
        earlier_batches = batches.setdefault(call.number, set())
        result.duplicates += (call.number, call.attempt) in seen
        result.unmarked += (
            bool(earlier_batches) and not call.redelivered and call.batch_id not in earlier_batches
        )
        seen.add((call.number, call.attempt))
        earlier_batches.add(call.batch_id)


def _check_attempts(
    result: CaseResult, calls: Sequence[expected.BatchInput], letters: Sequence[DeadLetter]
) -> None:
    """Checks that the death of a task uses up no attempt."""
    used: dict[int, int] = {}
    for call in calls:
        used[call.number] = max(used.get(call.number, 0), call.attempt)
    used |= {letter.number: letter.attempt for letter in letters}
    mismatched = [number for number, count in used.items() if count != expected.attempts(number)]
    if mismatched:
        result.mistakes.append(f"messages {mismatched[:10]} used a wrong number of attempts")


def _check_reports(
    result: CaseResult, staging: Path, runs: int, dead: Counter[int], *, exact: bool
) -> None:
    """Checks that the package's reports balance and agree with the queue.

    :param exact: Whether every message is settled once; otherwise the totals may exceed the queue's
        by the number of duplicates.
    """
    totals: Counter[str] = Counter()
    reports = sorted(staging.rglob("report.json"))
    for path in reports:
        report = json.loads(path.read_text())
        totals.update(report["totals"])
        if not report["balanced"]:
            result.mistakes.append(f"{path} does not balance: {report['totals']}")
    if len(reports) != runs:
        result.mistakes.append(f"{runs} runs left {len(reports)} reports")
    for name, count in (("dead_lettered", len(dead)), ("acked", result.messages - len(dead))):
        tolerance = 0 if exact else result.duplicates
        if not count <= totals[name] <= count + tolerance:
            result.mistakes.append(f"{totals[name]} {name} by the reports, {count} by the queue")
