"""Accounts for every message from independent records.

These are the broker's own queues, and the recorded calls of the callbacks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from airflow_broadway.testing.crashes.callbacks import INJECTED, RecordedCall, recorded_calls
from airflow_broadway.testing.crashes.sink import ForkError
from airflow_broadway.testing.crashes.subject import Subject

#: Permanent files: the root's file, the last run's folder and marker, the last depth report, crash
#: records, the archive and the applied index.
_PERMANENT = re.compile(
    r"^\.broadway-root\.json$|^[^/]+/[^/]+/(?:last/|_balanced/[^/]+-last\.json$|_backlog\.json$)"
    r"|^[^/]+/_(?:applied|archive|crashes)/"
)

#: The outcomes of a message; dropped: it failed, and the producer does not keep failed messages.
ACKED, DEAD, DROPPED = "acked", "dead", "dropped"


class Violation(StrEnum):
    """A kind of violation found at the end of a case."""

    #: A message was neither handled nor kept.
    LOST = "lost"
    MISSING = "missing in the sink"
    REPEATED = "repeated in the sink"
    #: A message was redelivered without being marked.
    UNMARKED = "repeated without a mark"
    #: A file, a lease or a queue will never be removed.
    LEFT = "left over"
    OTHER = "mistake"


@dataclass
class Account:
    """The account of a case's messages."""

    #: Message number → outcome.
    outcomes: dict[int, str] = field(default_factory=dict)
    #: The violations by kind.
    violations: dict[Violation, list[str]] = field(default_factory=dict)
    #: The reasons of dead letters, if the broker reports them.
    reasons: list[str] = field(default_factory=list)
    #: The rows of the sink; ``None`` without a sink.
    rows: Counter[str] | None = None
    #: Whether an injected fault failed the last attempt of a message that should succeed.
    exhausted_by_fault: bool = False

    def add(self, kind: Violation, text: str) -> None:
        """Adds a violation."""
        self.violations.setdefault(kind, []).append(text)

    @property
    def passed(self) -> bool:
        return not self.violations

    @property
    def lines(self) -> list[str]:
        """The violations as sentences."""
        return [
            f"{kind.value}: {text}" for kind in Violation for text in self.violations.get(kind, ())
        ]


def check_messages(
    subject: Subject,
    ids: Sequence[str],
    expected: Account | None = None,
    failing: Collection[str] = (),
) -> Account:
    """Accounts for the messages of a finished case.

    :param ids: The ids of all sent messages, in order.
    :param expected: The account without faults; ``None`` if unknown.
    :param failing: Executions whose callbacks were made to fail, which uses up an attempt of their
        messages, possibly the last.
    """
    account = Account()
    calls = list(recorded_calls(subject.calls_file))
    _check_outcomes(account, subject, ids, calls, expected, failing)
    _check_marks(account, calls)
    _compare_batches(account, calls)
    if waiting := subject.waiting():
        account.add(Violation.LEFT, f"{waiting} messages in the queue")
    for text in (*subject.leftovers(), *_files(subject)):
        account.add(Violation.LEFT, text)
    _compare_rows(account, subject, ids, expected)
    for check in subject.checks:
        check(subject, ids, calls, account)
    return account


def _check_outcomes(
    account: Account,
    subject: Subject,
    ids: Sequence[str],
    calls: Sequence[RecordedCall],
    expected: Account | None,
    failing: Collection[str],
) -> None:
    last = "handle_batch" if subject.pipeline.batchers else "handle_message"
    done = {
        message_id for call in calls if call.stage == last for message_id in call.succeeded or ()
    }
    done |= {
        message_id
        for call in calls
        if call.stage == "ack_immediately"
        for message_id, _, _ in call.messages
    }
    handled = {message_id for call in calls for message_id, _, _ in call.messages}
    drops = _drops(subject)
    affected = {
        message_id
        for call in calls
        if call.execution in failing
        for message_id, _, _ in call.messages
    }
    letters = subject.letters()
    dead = {letter.message_id for letter in letters}
    # A fault before a callback leaves no record of its messages.
    affected |= {letter.message_id for letter in letters if INJECTED in letter.reason}
    account.reasons = [letter.reason for letter in letters if letter.reason]
    for place, message_id in enumerate(ids):
        outcome = DEAD if message_id in dead else ACKED if message_id in done else ""
        expected_outcome = None if expected is None else expected.outcomes[place]
        may_drop = expected_outcome in (None, DROPPED) or message_id in affected
        if not outcome and drops and message_id in handled and may_drop:
            outcome = DROPPED
        account.outcomes[place] = outcome
        if not outcome:
            account.add(Violation.LOST, message_id)
        elif expected_outcome == ACKED != outcome and message_id in affected:
            account.exhausted_by_fault = True
        elif expected_outcome not in (None, outcome):
            account.add(
                Violation.OTHER, f"{message_id} is {outcome}, and should be {expected_outcome}"
            )
    for message_id in dead:
        marks = [letter.marked for letter in letters if letter.message_id == message_id]
        if marks.count(False) > 1:
            account.add(Violation.UNMARKED, f"{message_id} has {len(marks)} dead letters")


def _drops(subject: Subject) -> bool:
    """Returns whether failed messages may be dropped."""
    producer = subject.pipeline.producer
    return producer.on_failure == "ack" or not producer.retry.dead_letter


def _compare_rows(
    account: Account, subject: Subject, ids: Sequence[str], expected: Account | None
) -> None:
    try:
        account.rows = subject.rows(ids)
    except ForkError as error:
        account.add(Violation.OTHER, f"the sink cannot be read: {error}")
        return
    if account.rows is None or expected is None or expected.rows is None:
        return
    for row in sorted(account.rows | expected.rows):
        count, wanted = account.rows[row], expected.rows[row]
        if count != wanted:
            text = f"{row} is there {_times(count)}, and should be {_times(wanted)}"
            if count > wanted:
                account.add(Violation.REPEATED, text)
            elif not account.exhausted_by_fault:
                account.add(Violation.MISSING, text)


def _times(number: int) -> str:
    return {0: "nowhere", 1: "once", 2: "twice"}.get(number, f"{number} times")


def _check_marks(account: Account, calls: Sequence[RecordedCall]) -> None:
    """Checks that at most one delivery of a message per attempt is not marked as redelivered; a
    repeated batch is the same delivery.
    """
    unmarked: dict[tuple[str, str, int], set[str]] = {}
    for call in calls:
        if call.succeeded is not None:
            continue
        for message_id, attempt, redelivered in call.messages:
            if not redelivered:
                delivery = call.batch_id or call.execution
                unmarked.setdefault((call.stage, message_id, attempt), set()).add(delivery)
    for (stage, message_id, attempt), deliveries in unmarked.items():
        if len(deliveries) > 1:
            where = ", ".join(sorted(deliveries))
            account.add(Violation.UNMARKED, f"{message_id}, attempt {attempt}, in {stage}: {where}")


def _compare_batches(account: Account, calls: Sequence[RecordedCall]) -> None:
    """Checks that a repeated batch has the same messages."""
    batches: dict[str, list[str]] = {}
    for call in calls:
        if call.batch_id:
            keys = [message_id for message_id, _, _ in call.messages]
            if batches.setdefault(call.batch_id, keys) != keys:
                account.add(
                    Violation.OTHER,
                    f"batch {call.batch_id} was repeated in {call.execution} with other messages",
                )


def _files(subject: Subject) -> list[str]:
    """Returns files that will never be removed: neither of the last run nor permanent."""
    return [
        path
        for path in subject.staged()
        if not _PERMANENT.search(path) and not re.search(subject.permanent, path)
    ]
