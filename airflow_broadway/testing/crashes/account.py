"""Accounts for every message from independent records.

These are the broker's own queues, and the recorded calls of the callbacks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from airflow_broadway.testing.crashes.callbacks import INJECTED, RecordedCall, recorded_calls
from airflow_broadway.testing.crashes.sink import SinkError
from airflow_broadway.testing.crashes.subject import Subject

#: Permanent files: the root's file, the last run's folder and marker, the last depth report, crash
#: records and the archive.
_PERMANENT = re.compile(
    r"^\.broadway-root\.json$|^[^/]+/[^/]+/(?:last/|_balanced/[^/]+-last\.json$|_backlog\.json$)"
    r"|^[^/]+/_(?:archive|crashes)/"
)

#: The outcomes of a message; dropped: it failed, and the producer does not keep failed messages.
ACKED, DEAD, DROPPED = "acked", "dead", "dropped"


class Violation(StrEnum):
    """A kind of violation found at the end of a case."""

    LOST = "lost"
    MISSING = "missing in the sink"
    REPEATED = "repeated in the sink"
    UNMARKED = "repeated without a mark"
    LEFT = "left over"
    OTHER = "mistake"


@dataclass
class Account:
    """The account of a case's messages."""

    #: Message number → outcome.
    fates: dict[int, str] = field(default_factory=dict)
    #: Messages that were neither handled nor kept.
    lost: list[str] = field(default_factory=list)
    #: Messages that were redelivered without being marked.
    unmarked: list[str] = field(default_factory=list)
    #: Files, leases and queues that will never be removed.
    left: list[str] = field(default_factory=list)
    #: Duplicate rows of the sink.
    repeated: list[str] = field(default_factory=list)
    #: Rows missing in the sink.
    missing: list[str] = field(default_factory=list)
    #: All other violations.
    mistakes: list[str] = field(default_factory=list)
    #: The reasons of dead letters, if the broker reports them.
    reasons: list[str] = field(default_factory=list)
    #: The rows of the sink; ``None`` without a sink.
    rows: Counter[str] | None = None
    #: Whether an injected fault failed the last attempt of a message that should succeed.
    made_to_fail: bool = False

    @property
    def wrong(self) -> dict[Violation, list[str]]:
        """The violations by kind."""
        violations = {
            Violation.LOST: self.lost,
            Violation.MISSING: self.missing,
            Violation.REPEATED: self.repeated,
            Violation.UNMARKED: self.unmarked,
            Violation.LEFT: self.left,
            Violation.OTHER: self.mistakes,
        }
        return {kind: lines for kind, lines in violations.items() if lines}

    @property
    def good(self) -> bool:
        return not self.wrong

    @property
    def lines(self) -> list[str]:
        """The violations as sentences."""
        return [f"{kind.value}: {text}" for kind, texts in self.wrong.items() for text in texts]


def account(
    subject: Subject,
    ids: Sequence[str],
    fates: Mapping[int, str] | None,
    rows: Counter[str] | None = None,
    failing: Collection[str] = (),
) -> Account:
    """Accounts for the messages of a finished case.

    :param ids: The ids of all sent messages, in order.
    :param fates: Message number → outcome without faults; ``None`` if unknown.
    :param rows: The rows of the sink without faults; ``None`` if unknown.
    :param failing: Executions whose callbacks were made to fail, which uses up an attempt of their
        messages, possibly the last.
    """
    tally = Account()
    calls = list(recorded_calls(subject.calls_file))
    _count_ends(tally, subject, ids, calls, fates, failing)
    _count_repeats(tally, calls)
    _compare_batches(tally, calls)
    _check_order(tally, calls, {key: subject.group_of(place) for place, key in enumerate(ids)})
    if waiting := subject.waiting():
        tally.left.append(f"{waiting} messages in the queue")
    tally.left += subject.left()
    tally.left += _files(subject)
    _check_archive(tally, subject, ids)
    _compare_rows(tally, subject, ids, rows)
    return tally


def _count_ends(
    tally: Account,
    subject: Subject,
    ids: Sequence[str],
    calls: Sequence[RecordedCall],
    fates: Mapping[int, str] | None,
    failing: Collection[str],
) -> None:
    last = "handle_batch" if subject.pipeline.batchers else "handle_message"
    done = {key for call in calls if call.stage == last for key in call.succeeded or ()}
    done |= {
        key for call in calls if call.stage == "ack_immediately" for key, _, _ in call.messages
    }
    handled = {key for call in calls for key, _, _ in call.messages}
    drops = _drops(subject)
    tried = {key for call in calls if call.execution in failing for key, _, _ in call.messages}
    letters = subject.letters()
    dead = {letter.message_id for letter in letters}
    # A fault before a callback leaves no record of its messages.
    tried |= {letter.message_id for letter in letters if INJECTED in letter.reason}
    tally.reasons = [letter.reason for letter in letters if letter.reason]
    for place, key in enumerate(ids):
        fate = DEAD if key in dead else ACKED if key in done else ""
        may_drop = fates is None or fates[place] == DROPPED or key in tried
        if not fate and drops and key in handled and may_drop:
            fate = DROPPED
        tally.fates[place] = fate
        expected = fate if fates is None else fates[place]
        if not fate:
            tally.lost.append(key)
        elif fate != expected and key in tried and expected == ACKED:
            tally.made_to_fail = True
        elif fate != expected:
            tally.mistakes.append(f"{key} is {fate}, and should be {expected}")
    for key in dead:
        marks = [letter.marked for letter in letters if letter.message_id == key]
        if marks.count(False) > 1:
            tally.unmarked.append(f"{key} has {len(marks)} dead letters")


def _drops(subject: Subject) -> bool:
    """Returns whether failed messages may be dropped."""
    producer = subject.pipeline.producer
    return producer.on_failure == "ack" or not producer.retry.dead_letter


def _compare_rows(
    tally: Account, subject: Subject, ids: Sequence[str], expected_rows: Counter[str] | None
) -> None:
    try:
        tally.rows = subject.rows(ids)
    except SinkError as error:
        tally.mistakes.append(f"the sink cannot be read: {error}")
        return
    if tally.rows is None or expected_rows is None:
        return
    for row in sorted(tally.rows | expected_rows):
        count, expected = tally.rows[row], expected_rows[row]
        if count != expected:
            text = f"{row} is there {_times(count)}, and should be {_times(expected)}"
            if count > expected:
                tally.repeated.append(text)
            elif not tally.made_to_fail:
                tally.missing.append(text)


def _check_archive(tally: Account, subject: Subject, ids: Sequence[str]) -> None:
    """Checks that settled messages are in the archive, if the pipeline has a local one."""
    archive = subject.work / "staging" / subject.pipeline.__name__ / "_archive"
    if subject.pipeline.archive is None or not subject.staging.startswith("file:"):
        return
    from pyarrow import parquet

    archived: set[str] = set()
    for index in archive.glob("index/*.json"):
        for path in json.loads(index.read_text())["files"]:
            # Without threads: this process forks.
            rows = parquet.ParquetFile(archive / path).read(
                ["message_id", "metadata"], use_threads=False
            )
            archived.update(map(subject.archived_id, rows.to_pylist()))
    for place, key in enumerate(ids):
        if tally.fates[place] and key not in archived:
            tally.lost.append(f"{key}, in the archive")


def _times(number: int) -> str:
    return {0: "nowhere", 1: "once", 2: "twice"}.get(number, f"{number} times")


def _count_repeats(tally: Account, calls: Sequence[RecordedCall]) -> None:
    """Checks that at most one delivery of a message per attempt is not marked as redelivered; a
    repeated batch is the same delivery.
    """
    unmarked: dict[tuple[str, str, int], set[str]] = {}
    for call in calls:
        if call.succeeded is not None:
            continue
        for key, attempt, redelivered in call.messages:
            if not redelivered:
                delivery = call.batch_id or call.execution
                unmarked.setdefault((call.stage, key, attempt), set()).add(delivery)
    for (stage, key, attempt), deliveries in unmarked.items():
        if len(deliveries) > 1:
            where = ", ".join(sorted(deliveries))
            tally.unmarked.append(f"{key}, attempt {attempt}, in {stage}: {where}")


def _compare_batches(tally: Account, calls: Sequence[RecordedCall]) -> None:
    """Checks that a repeated batch has the same messages."""
    batches: dict[str, list[str]] = {}
    for call in calls:
        if call.batch_id:
            keys = [key for key, _, _ in call.messages]
            if batches.setdefault(call.batch_id, keys) != keys:
                tally.mistakes.append(
                    f"batch {call.batch_id} was repeated in {call.execution} with other messages"
                )


def _check_order(
    tally: Account, calls: Sequence[RecordedCall], groups: Mapping[str, str | None]
) -> None:
    """Checks that the messages of a group are first handled in the order sent."""
    place = {key: number for number, key in enumerate(groups)}
    newest: dict[str, str] = {}
    seen: set[str] = set()
    for call in calls:
        for key, _, _ in call.messages if call.stage == "handle_message" else ():
            group = groups.get(key)
            if group is None or key in seen:
                continue
            seen.add(key)
            before = newest.setdefault(group, key)
            if place[before] > place[key]:
                tally.mistakes.append(
                    f"{key} is first handled after {before}, which follows it in group {group}"
                )
            newest[group] = key


def _files(subject: Subject) -> list[str]:
    """Returns files that will never be removed: neither of the last run nor permanent."""
    return [
        path
        for path in subject.staged()
        if not _PERMANENT.search(path) and not re.search(subject.permanent, path)
    ]
