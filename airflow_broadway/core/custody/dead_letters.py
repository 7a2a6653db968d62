"""Administration of dead letters: list, requeue, delete.

A producer that dead-letters messages opens its dead-letter queue by
:meth:`~airflow_broadway.core.custody.producer.Producer.dead_letters`.  Its operations block no run
and may be killed at any time: a dead letter is removed only after its message is durably back in
its source.  A message that is requeued twice for that reason is marked as redelivered.

Every implementation passes ``airflow_broadway.testing.contract.DeadLettersContract``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import printable


class DeadLetter(NamedTuple):
    """A dead-lettered message, and the reason.

    :param message_id: The dead letter's own id, assigned by its broker or derived from all of its
        content: no sender can choose it.
    :param properties: The broker's properties of the message, as JSON values.
    :param reason: The last failure's reason, at most 2,048 bytes of UTF-8; ``""`` if unknown.
    :param stage: The failed stage: ``process``, ``batch``, ``secure``, …; ``""`` if unknown.
    :param attempt: The last attempt.
    :param enqueued_at: When it was sent; ``None`` if unknown.
    :param died_at: When it was dead-lettered; ``None`` if unknown.
    :param generation: The execution that dead-lettered it; ``""`` if unknown.
    :param origin: The queue or topic it came from, by its own header; else the pipeline's source.
    :param original_id: The id of its message, by its own header: any program that can publish there
        can write one.
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
    """A filter of dead letters; all criteria must match.

    :param ids: Matches these ids, as the dead letter's own id or as its ``original_id``; ``None``
        matches any.  Dead letters are moved by their own ids only.
    :param reason: Matches reasons that contain it.
    :param stage: Matches this stage.
    :param since: Matches dead letters of this timestamp or later.
    :param until: Matches dead letters before this timestamp.  A dead letter without a timestamp
        matches neither.
    """

    ids: frozenset[str] | None = None
    reason: str = ""
    stage: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def takes(self, letter: DeadLetter) -> bool:
        """Returns whether a dead letter matches."""
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


#: Matches all dead letters.
EVERY = Choice()

#: The dead letters, and the characters of a dead letter's text, that an error quotes at most.
_MAX_CLAIMS, _MAX_ORIGIN = 5, 200


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a requeue or a deletion.

    :param count: Dead letters that were requeued or deleted.
    :param unknown: Requested ids without a matching dead letter: moved by another process, or
        mistyped.
    :param refused: Ids of dead letters that were not moved → the reason.
    """

    count: int
    unknown: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Moving:
    """Counts while dead letters are moved; for implementations of :class:`DeadLetters`."""

    choice: Choice
    count: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    #: Requested ids that are ``original_id`` of dead letters → the ids of those dead letters.
    _claims: dict[str, list[str]] = field(default_factory=dict)

    def takes(self, letter: DeadLetter) -> bool:
        """Returns whether a dead letter is to be moved; records its id if it is."""
        if not self.choice.takes(letter):
            return False
        if self.choice.ids is not None:
            if letter.message_id not in self.choice.ids:
                self._claims.setdefault(letter.original_id, []).append(letter.message_id)
                return False
            self._seen.add(letter.message_id)
        return True

    def result(self) -> Moved:
        """Returns the result so far."""
        for key in self._claims.keys() - self._seen:
            claimants = ", ".join(self._claims[key][:_MAX_CLAIMS])
            self.refused[key] = (
                "it is a message's id, which any program can write into a dead letter; use the"
                f" dead letter's own id: {claimants}"
            )
        known = self._seen | self._claims.keys()
        return Moved(self.count, tuple(sorted((self.choice.ids or set()) - known)), self.refused)


def destination_of(letter: DeadLetter, sources: Sequence[str], to: str | None) -> str:
    """Returns the queue to which a dead letter is requeued: ``to``, else a source of the pipeline.

    A dead letter can select one of the pipeline's own sources only: any program that can publish to
    the dead-letter queue can write its origin.

    :raises ProducerError: If its origin is no source of the pipeline, or it has none and there are
        several sources.
    """
    if to is not None:
        return to
    if letter.origin in sources:
        return letter.origin
    if not letter.origin:
        raise ProducerError(
            f"its origin is unknown, one of {', '.join(sources)}; name the destination with --to"
        )
    raise ProducerError(
        f"its origin is {printable(letter.origin)[:_MAX_ORIGIN]!r}, which is no source"
        " of this pipeline, and any program can write that; name the destination with --to"
    )


class DeadLetters(Protocol):
    """A dead-letter queue or topic; used from one thread.

    Other processes may list, requeue and delete concurrently, and runs may add dead letters.

    :raises BroadwayError: From every method, if it does not exist or cannot be reached.
    """

    @property
    def place(self) -> str:
        """Its name at the broker."""

    def count(self) -> int:
        """Returns the number of dead letters, by the broker's count."""

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """Iterates over the matching dead letters, roughly by age; they are not removed.

        Close the iterator if it is not exhausted: some brokers hide the dead letters that it has
        read from other consumers meanwhile.
        """

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """Requeues matching dead letters to the pipeline's source, each with its own route and
        properties, on its first attempt.  Dead letters added after the call began may stay.

        A message is durably stored before its dead letter is removed.

        :param to: Another queue or topic as destination.
        """

    def delete(self, choice: Choice = EVERY) -> Moved:
        """Deletes the matching dead letters permanently."""

    def close(self) -> None:
        """Releases connections.  Safe to repeat."""
