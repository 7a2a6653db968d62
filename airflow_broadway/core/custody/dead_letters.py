"""Dead letters, for people: to look at them, to send them back, to delete them.

A producer that sets messages aside opens its place for dead letters by
:meth:`~airflow_broadway.core.custody.producer.Producer.dead_letters`.  What is asked there holds up
no run, and whoever asks may be killed at any time: a letter is in its place until its message is
back where it came from, durably.  What was sent back twice for that reason is marked, as whatever
may have been handed out before.

``airflow_broadway.testing.contract.DeadLettersContract`` is the suite that every one passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import printable


class DeadLetter(NamedTuple):
    """A message that was set aside, and why.

    :param message_id: The letter's own id, by its broker or of all of its content: no sender can
        choose it.
    :param properties: What its broker keeps beside the body, as JSON values.
    :param reason: Why it failed last, at most 2,048 bytes of UTF-8; ``""`` if nobody said.
    :param stage: Where: ``process``, ``batch``, ``secure``, …; ``""`` if nobody said.
    :param attempt: The attempt that was its last.
    :param enqueued_at: When it was sent; ``None`` where that is not known.
    :param died_at: When it was set aside; ``None`` where that is not known.
    :param generation: The execution that gave it up; ``""`` where that is not known.
    :param origin: The queue or topic that it came from, as it says; else the pipeline's source.
    :param original_id: The id of its message, as the letter says: any program that can publish
        there can write one.
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
    original_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which dead letters: those to which all of it applies.

    :param ids: Those of these ids, or whose message had one of them, as they say; ``None``: of
        any.  Letters are moved by their own ids only.
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
        if self.ids is not None and self.ids.isdisjoint((letter.message_id, letter.original_id)):
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

#: Letters, and characters of a letter's text, that a refusal has.
_MAX_CLAIMS, _MAX_ORIGIN = 5, 200


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
    #: Ids of messages that were named → the letters that say that theirs had it.
    _claims: dict[str, list[str]] = field(default_factory=dict)

    def takes(self, letter: DeadLetter) -> bool:
        """Whether a letter is to be moved; one that is, is known from now on."""
        if not self.choice.takes(letter):
            return False
        if self.choice.ids is not None:
            if letter.message_id not in self.choice.ids:
                self._claims.setdefault(letter.original_id, []).append(letter.message_id)
                return False
            self._seen.add(letter.message_id)
        return True

    def result(self) -> Moved:
        """What it came to."""
        for key in self._claims.keys() - self._seen:
            named = ", ".join(self._claims[key][:_MAX_CLAIMS])
            self.refused[key] = (
                "it is the id of a message, which any program can write on a letter; use the"
                f" letter's own id: {named}"
            )
        known = self._seen | self._claims.keys()
        return Moved(self.count, tuple(sorted((self.choice.ids or set()) - known)), self.refused)


def destination_of(letter: DeadLetter, sources: Sequence[str], to: str | None) -> str:
    """Returns the queue to which a letter is sent back: ``to``, else a source of the pipeline.

    A letter can choose among the pipeline's own sources and nothing else: any program that can
    publish to its place can write where it came from.

    :raises ProducerError: If it says that it came from elsewhere, or does not say from which of
        several sources.
    """
    if to is not None:
        return to
    if letter.origin in sources:
        return letter.origin
    if not letter.origin:
        raise ProducerError(
            f"it does not say which of {', '.join(sources)} it came from; name the destination"
            " with --to"
        )
    raise ProducerError(
        f"it says that it came from {printable(letter.origin)[:_MAX_ORIGIN]!r}, which is no source"
        " of this pipeline, and any program can write that; name the destination with --to"
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

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """Send them back to the pipeline's source, each with its own route and properties, on its
        first attempt; what is set aside after the call began may stay.

        :param to: Another queue, or topic, that they are sent to.

        A message is there, durably, before its letter is removed.
        """
        ...

    def delete(self, choice: Choice = EVERY) -> Moved:
        """Remove them for good."""
        ...

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        ...
