"""Dead letters, for people: to look at them, to send them back, to delete them.

A producer that sets messages aside opens its place for dead letters by
:meth:`~airflow_broadway.core.custody.producer.Producer.dead_letters`.  What is asked there holds up
no run, and whoever asks may be killed at any time: a letter is in its place until its message is
back where it came from, durably.  What was sent back twice for that reason is marked, as whatever
may have been handed out before.

``airflow_broadway.testing.contract.DeadLettersContract`` is the suite that every one passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

__all__ = ["EVERY", "Choice", "DeadLetter", "DeadLetters", "Moved", "Moving"]


class DeadLetter(NamedTuple):
    """A message that was set aside, and why.

    :param message_id: What names it: the message's id where the letter has it, else one that is
        made of what lies there.
    :param properties: What its broker keeps beside the body, as JSON values.
    :param reason: Why it failed last, at most 2,048 bytes of UTF-8; ``""`` if nobody said.
    :param stage: Where: ``process``, ``batch``, ``secure``, …; ``""`` if nobody said.
    :param attempt: The attempt that was its last.
    :param enqueued_at: When it was sent; ``None`` where that is not known.
    :param died_at: When it was set aside; ``None`` where that is not known.
    :param generation: The execution that gave it up; ``""`` where that is not known.
    :param origin: The queue or topic that it goes back to.
    """

    message_id: str
    body: bytes
    properties: Mapping[str, Any]
    reason: str
    stage: str
    attempt: int
    enqueued_at: datetime | None
    died_at: datetime | None
    generation: str
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which dead letters: those to which all of it applies.

    :param ids: Those of these ids; ``None``: of any.
    :param reason: Those whose reason contains it.
    :param stage: Those of this stage.
    :param since: Those set aside at this instant or later.
    :param until: Those set aside before this instant.  One of which nobody knows when it was set
        aside is in no stretch of time.
    """

    ids: frozenset[str] | None = None
    reason: str = ""
    stage: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def takes(self, letter: DeadLetter) -> bool:
        """Whether a letter is among them."""
        if self.ids is not None and letter.message_id not in self.ids:
            return False
        if self.reason not in letter.reason or self.stage not in ("", letter.stage):
            return False
        if self.since is None and self.until is None:
            return True
        at = letter.died_at
        if at is None or (self.since is not None and at < self.since):
            return False
        return self.until is None or at < self.until


#: All of them.
EVERY = Choice()


@dataclass(frozen=True, slots=True)
class Moved:
    """What was done with the letters that were chosen.

    :param count: Letters that were sent back, or deleted.
    :param unknown: Ids that were named, and of which no chosen letter was there: somebody was
        faster, or they are mistyped.
    :param refused: Ids of letters that stay, and why.
    """

    count: int
    unknown: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Moving:
    """Counts while letters are moved; for who writes a :class:`DeadLetters`."""

    choice: Choice
    count: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def takes(self, letter: DeadLetter) -> bool:
        """Whether a letter is to be moved; one that is, is known from now on."""
        taken = self.choice.takes(letter)
        if taken and self.choice.ids is not None:
            self._seen.add(letter.message_id)
        return taken

    def result(self) -> Moved:
        """What it came to."""
        return Moved(
            self.count, tuple(sorted((self.choice.ids or set()) - self._seen)), self.refused
        )


class DeadLetters(Protocol):
    """One place for dead letters; used from one thread.

    Others may look, send back and delete at the same time, and runs may set messages aside.

    :raises BroadwayError: From every method, if the place is not there or cannot be reached.
    """

    @property
    def place(self) -> str:
        """What it is called at its broker."""
        ...

    def count(self) -> int:
        """How many there are, as the broker counts them."""
        ...

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """Those that are chosen, about in order of their death; they stay where they are.

        Close the iterator, if it is not read to its end: some brokers keep what it has read from
        others meanwhile.
        """
        ...

    def requeue(self, choice: Choice = EVERY) -> Moved:
        """Send them back where they came from, each with its own route and properties, on its first
        attempt; what is set aside after the call began may stay.

        A message is there, durably, before its letter is removed.
        """
        ...

    def delete(self, choice: Choice = EVERY) -> Moved:
        """Remove them for good."""
        ...

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        ...
