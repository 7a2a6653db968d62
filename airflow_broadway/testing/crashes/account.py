"""Counts what became of every message, from witnesses that are not ours.

The broker's own queues, and what the callbacks got, written down from outside.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from airflow_broadway.testing.crashes.callbacks import STRUCK, Witnessed, witnessed
from airflow_broadway.testing.crashes.sink import SinkError
from airflow_broadway.testing.crashes.subject import Subject

#: The root's own file, the last run's folder and its mark, the last report of the queue's depth;
#: crash records; an archive is for good.
_STAYS = re.compile(
    r"^\.broadway-root\.json$|^[^/]+/[^/]+/(?:last/|_balanced/[^/]+-last\.json$|_backlog\.json$)"
    r"|^[^/]+/_(?:archive|crashes)/"
)

#: The fates of a message; dropped is one that failed where the producer keeps none that fails.
ACKED, DEAD, DROPPED = "acked", "dead", "dropped"


class Wrong(StrEnum):
    """What can be wrong at the end of a case."""

    LOST = "lost"
    MISSING = "missing in the sink"
    REPEATED = "repeated in the sink"
    UNMARKED = "repeated without a mark"
    LEFT = "left over"
    OTHER = "mistake"


@dataclass
class Account:
    """What became of the messages of a case."""

    #: What became of each, by its place.
    fates: dict[int, str] = field(default_factory=dict)
    #: Messages that nobody has.
    lost: list[str] = field(default_factory=list)
    #: Messages that were handled again, and did not say so.
    unmarked: list[str] = field(default_factory=list)
    #: Files, leases and queues that nobody will remove.
    left: list[str] = field(default_factory=list)
    #: Rows that the sink holds too often.
    repeated: list[str] = field(default_factory=list)
    #: Rows that it does not hold, or not as often as it should.
    missing: list[str] = field(default_factory=list)
    #: Everything else that is wrong.
    mistakes: list[str] = field(default_factory=list)
    #: Why messages died, where the broker says so.
    reasons: list[str] = field(default_factory=list)
    #: What the sink holds; ``None``: there is none to look at.
    rows: Counter[str] | None = None
    #: Whether a message that should succeed was made to fail at its last attempt.
    made_to_fail: bool = False

    @property
    def wrong(self) -> dict[Wrong, list[str]]:
        """What is wrong, by its kind."""
        found = {
            Wrong.LOST: self.lost,
            Wrong.MISSING: self.missing,
            Wrong.REPEATED: self.repeated,
            Wrong.UNMARKED: self.unmarked,
            Wrong.LEFT: self.left,
            Wrong.OTHER: self.mistakes,
        }
        return {kind: told for kind, told in found.items() if told}

    @property
    def good(self) -> bool:
        return not self.wrong

    @property
    def lines(self) -> list[str]:
        """What is wrong, in sentences."""
        return [f"{kind.value}: {each}" for kind, told in self.wrong.items() for each in told]


def account(
    subject: Subject,
    ids: Sequence[str],
    fates: Mapping[int, str] | None,
    rows: Counter[str] | None = None,
    failing: Collection[str] = (),
) -> Account:
    """Count the messages of a finished case.

    :param ids: Of all that were sent, in order.
    :param fates: What becomes of each where nothing is struck; ``None``: it is not known.
    :param rows: What the sink holds then; ``None``: it is not known.
    :param failing: Executions whose callbacks were made to fail: that uses up an attempt of what
        they handled, which may have been the last.
    """
    found = Account()
    calls = list(witnessed(subject.witness))
    _count_ends(found, subject, ids, calls, fates, failing)
    _count_repeats(found, calls)
    _compare_batches(found, calls)
    _check_order(found, calls, {key: subject.group_of(place) for place, key in enumerate(ids)})
    if waiting := subject.waiting():
        found.left.append(f"{waiting} messages in the queue")
    found.left += subject.left()
    found.left += _files(subject)
    _check_archive(found, subject, ids)
    _compare_rows(found, subject, ids, rows)
    return found


def _count_ends(
    found: Account,
    subject: Subject,
    ids: Sequence[str],
    calls: Sequence[Witnessed],
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
    # A callback that was struck before it began has not told what it was given.
    tried |= {letter.message_id for letter in letters if STRUCK in letter.reason}
    found.reasons = [letter.reason for letter in letters if letter.reason]
    for place, key in enumerate(ids):
        fate = DEAD if key in dead else ACKED if key in done else ""
        may_drop = fates is None or fates[place] == DROPPED or key in tried
        if not fate and drops and key in handled and may_drop:
            fate = DROPPED
        found.fates[place] = fate
        wanted = fate if fates is None else fates[place]
        if not fate:
            found.lost.append(key)
        elif fate != wanted and key in tried and wanted == ACKED:
            found.made_to_fail = True
        elif fate != wanted:
            found.mistakes.append(f"{key} is {fate}, and should be {wanted}")
    for key in dead:
        marks = [letter.marked for letter in letters if letter.message_id == key]
        if marks.count(False) > 1:
            found.unmarked.append(f"{key} has {len(marks)} dead letters")


def _drops(subject: Subject) -> bool:
    """Whether a message that fails may be gone, and nobody keeps it."""
    producer = subject.pipeline.producer
    return producer.on_failure == "ack" or not producer.retry.dead_letter


def _compare_rows(
    found: Account, subject: Subject, ids: Sequence[str], wanted: Counter[str] | None
) -> None:
    try:
        found.rows = subject.rows(ids)
    except SinkError as error:
        found.mistakes.append(f"the sink cannot be read: {error}")
        return
    if found.rows is None or wanted is None:
        return
    for row in sorted(found.rows | wanted):
        there, right = found.rows[row], wanted[row]
        if there != right:
            told = f"{row} is there {_times(there)}, and should be {_times(right)}"
            if there > right:
                found.repeated.append(told)
            elif not found.made_to_fail:
                found.missing.append(told)


def _check_archive(found: Account, subject: Subject, ids: Sequence[str]) -> None:
    """What was settled is in the archive, where the pipeline has one, on this machine."""
    archive = subject.work / "staging" / subject.pipeline.__name__ / "_archive"
    if subject.pipeline.archive is None or not subject.staging.startswith("file:"):
        return
    from pyarrow import parquet

    kept: set[str] = set()
    for index in archive.glob("index/*.json"):
        for path in json.loads(index.read_text())["files"]:
            # No thread may begin here: this process forks.
            rows = parquet.ParquetFile(archive / path).read(
                ["message_id", "metadata"], use_threads=False
            )
            kept.update(map(subject.archived_id, rows.to_pylist()))
    for place, key in enumerate(ids):
        if found.fates[place] and key not in kept:
            found.lost.append(f"{key}, in the archive")


def _times(number: int) -> str:
    return {0: "nowhere", 1: "once", 2: "twice"}.get(number, f"{number} times")


def _count_repeats(found: Account, calls: Sequence[Witnessed]) -> None:
    """Of all deliveries of a message in one attempt, at most one does not say that it may not be
    the first; a batch that comes again is the same delivery.
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
            found.unmarked.append(f"{key}, attempt {attempt}, in {stage}: {where}")


def _compare_batches(found: Account, calls: Sequence[Witnessed]) -> None:
    """A batch has the same messages whenever it comes."""
    batches: dict[str, list[str]] = {}
    for call in calls:
        if call.batch_id:
            keys = [key for key, _, _ in call.messages]
            if batches.setdefault(call.batch_id, keys) != keys:
                found.mistakes.append(
                    f"batch {call.batch_id} came again in {call.execution} with other messages"
                )


def _check_order(
    found: Account, calls: Sequence[Witnessed], groups: Mapping[str, str | None]
) -> None:
    """The messages of a group are first handled in the order in which they were sent."""
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
                found.mistakes.append(
                    f"{key} is first handled after {before}, which follows it in group {group}"
                )
            newest[group] = key


def _files(subject: Subject) -> list[str]:
    """Files that nobody will remove: all that is not of the last run, nor for good."""
    return [
        path
        for path in subject.staged()
        if not _STAYS.search(path) and not re.search(subject.stays, path)
    ]
