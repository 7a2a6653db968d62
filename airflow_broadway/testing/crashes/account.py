"""Counts what became of every message, from witnesses that are not ours.

The broker's own queues, and what the callbacks got, written down from outside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from airflow_broadway.testing.crashes.callbacks import Witnessed, witnessed
from airflow_broadway.testing.crashes.subject import Subject

#: The root's own file, the last run's folder and its mark.
_STAYS = re.compile(r"^\.broadway-root\.json$|^[^/]+/[^/]+/(?:last/|_balanced/[^/]+-last\.json$)")

__all__ = ["ACKED", "DEAD", "Account", "account"]

#: The fates of a message.
ACKED, DEAD = "acked", "dead"


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
    #: Everything else that is wrong.
    mistakes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.unmarked or self.left or self.mistakes)

    @property
    def lines(self) -> list[str]:
        """What is wrong, in sentences."""
        return [
            *(f"lost: {each}" for each in self.lost),
            *(f"repeated without a mark: {each}" for each in self.unmarked),
            *(f"left over: {each}" for each in self.left),
            *self.mistakes,
        ]


def account(subject: Subject, ids: Sequence[str], fates: Mapping[int, str] | None) -> Account:
    """Count the messages of a finished case.

    :param ids: Of all that were sent, in order.
    :param fates: What becomes of each where nothing is struck; ``None``: it is not known.
    """
    found = Account()
    calls = list(witnessed(subject.witness))
    _count_ends(found, subject, ids, calls, fates)
    _count_repeats(found, calls)
    _compare_batches(found, calls)
    if waiting := subject.waiting():
        found.left.append(f"{waiting} messages in the queue")
    found.left += subject.left()
    found.left += _files(subject)
    return found


def _count_ends(
    found: Account,
    subject: Subject,
    ids: Sequence[str],
    calls: Sequence[Witnessed],
    fates: Mapping[int, str] | None,
) -> None:
    last = "handle_batch" if subject.pipeline.batchers else "handle_message"
    done = {key for call in calls if call.stage == last for key in call.succeeded or ()}
    letters = subject.letters()
    dead = {letter.message_id for letter in letters}
    for place, key in enumerate(ids):
        fate = DEAD if key in dead else ACKED if key in done else ""
        found.fates[place] = fate
        wanted = fate if fates is None else fates[place]
        if not fate:
            found.lost.append(key)
        elif fate != wanted:
            found.mistakes.append(f"{key} is {fate}, and should be {wanted}")
    for key in dead:
        marks = [letter.marked for letter in letters if letter.message_id == key]
        if marks.count(False) > 1:
            found.unmarked.append(f"{key} has {len(marks)} dead letters")


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


def _files(subject: Subject) -> list[str]:
    """Files that nobody will remove: all that is not of the last run, nor for good."""
    root = subject.work / "staging"
    found = (
        os.path.relpath(os.path.join(folder, name), root)
        for folder, _, names in os.walk(root)
        for name in names
    )
    return [
        path for path in found if not _STAYS.search(path) and not re.search(subject.stays, path)
    ]
