"""Lists, requeues and deletes dead letters at brokers that cannot browse without a delivery.

Listing hides dead letters from other consumers for a while, and counts as a delivery.  Dead letters
that are not moved become visible again immediately.  A requeued dead letter is deleted after the
broker has accepted its message, so a kill leaves it in both queues at most.  The broker treats the
requeued message as a new one, and it is received as redelivered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from airflow_broadway.core.custody.dead_letters import (
    EVERY,
    Choice,
    DeadLetter,
    Moved,
    Moving,
    destination_of,
)
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.producers.engine.port import (
    Broker,
    Hidden,
    Publisher,
    Received,
    Refusal,
)
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.kit.looks import LookCount


class EngineDeadLetters(ABC):
    """A queue's :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.

    :param source: The broker of the pipeline's queue; closed with this object.
    :param dead: The client of the dead-letter queue at the same broker.
    """

    #: The broker's term for a queue.
    word: ClassVar[str] = "queue"

    #: Seconds for which dead letters are hidden while they are listed.
    hidden_seconds: ClassVar[int] = 300

    def __init__(self, source: Broker[Any], dead: Any) -> None:
        self.source = source
        self.dead = dead
        self.requests = BatchRequests(source, 1)
        self._place = f"{self.word} {dead.name!r}"
        #: The queues that dead letters are requeued to, by name.
        self._publishers: dict[str, Publisher] = {}

    @property
    def place(self) -> str:
        return self._place

    def close(self) -> None:
        self.requests.close()
        self.source.close()

    def count(self) -> int:
        """Counts by receiving every dead letter; brokers with a counter override this."""
        return sum(1 for _ in self.letters())

    # -- for each broker -----------------------------------------------------------------------

    @abstractmethod
    def fetch(self) -> Sequence[Received]:
        """Receives some dead letters, hidden for :attr:`hidden_seconds`; none at the end."""

    @abstractmethod
    def limit(self) -> tuple[int | None, str]:
        """Returns the deliveries after which the broker removes a dead letter, and the setting.

        ``None`` means no limit.
        """

    @abstractmethod
    def letter(self, received: Received) -> DeadLetter:
        """Parses a dead letter."""

    @abstractmethod
    def publisher(self, name: str) -> Publisher:
        """Opens a queue that dead letters are requeued to.

        :raises BroadwayError: If there is no such queue.
        """

    @abstractmethod
    def back(self, letter: DeadLetter, received: Received, to: str) -> Any:
        """Builds the message for a requeued dead letter.

        :raises BroadwayError: If it cannot be requeued.
        """

    # -- listing and moving --------------------------------------------------------------------

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """See :meth:`.DeadLetters.letters`."""
        looks = self._looks()
        looks.begin()
        with self._hidden() as hidden:
            for batch in self._batches(hidden):
                for received in batch:
                    looks.note(received.deliveries)
                    letter = self.letter(received)
                    if choice.takes(letter):
                        yield letter
            looks.end()

    @contextmanager
    def _hidden(self) -> Iterator[dict[str, str]]:
        """Makes hidden dead letters visible at the end; yields a dict for their receipts by id."""
        hidden: dict[str, str] = {}
        try:
            yield hidden
        finally:
            with suppress(ProducerError):  # they become visible after hidden_seconds anyway
                entries = ((key, Hidden(receipt, 0)) for key, receipt in hidden.items())
                self.requests.send(self.dead.hide, entries)

    def _batches(self, hidden: dict[str, str]) -> Iterator[list[Received]]:
        """Receives all dead letters, and yields each of them once."""
        known: set[str] = set()
        while received := self.fetch():
            hidden |= {message.key: message.receipt for message in received}
            fresh = [message for message in received if message.key not in known]
            known |= {message.key for message in fresh}
            if not fresh:  # it has taken so long that the first are visible again
                return
            yield fresh

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """See :meth:`.DeadLetters.requeue`."""
        return self._move(choice, send=True, to=to)

    def delete(self, choice: Choice = EVERY) -> Moved:
        """See :meth:`.DeadLetters.delete`."""
        return self._move(choice, send=False)

    def _looks(self) -> LookCount:
        limit, setting = self.limit()
        return LookCount(self.source.env.staging, f"the {self._place}", limit, setting)

    def _move(self, choice: Choice, *, send: bool, to: str | None = None) -> Moved:
        moving = Moving(choice)
        looks = None if choice == EVERY else self._looks()
        if looks is not None:
            looks.begin()
        with self._hidden() as hidden:
            for batch in self._batches(hidden):
                if looks is not None:
                    looks.note(max(received.deliveries for received in batch))
                letters = ((self.letter(received), received) for received in batch)
                chosen = [entry for entry in letters if moving.takes(entry[0])]
                if send:
                    chosen = self._send_back(chosen, moving, to)
                self._delete(chosen, hidden, moving)
        return moving.result()

    def _send_back(
        self, chosen: Sequence[tuple[DeadLetter, Received]], moving: Moving, to: str | None
    ) -> list[tuple[DeadLetter, Received]]:
        """Requeues dead letters; returns those that the broker has accepted."""
        by_target: dict[str, dict[str, Any]] = {}
        for letter, original in chosen:
            try:
                target = destination_of(letter, [self.source.name], to)
                if target not in self._publishers:
                    self._publishers[target] = self.publisher(target)
                message = self.back(letter, original, target)
            except BroadwayError as error:
                moving.refused[letter.message_id] = str(error)
                continue
            by_target.setdefault(target, {})[original.key] = message
        refused: dict[str, Refusal] = {}
        for target, messages in by_target.items():
            publisher = self._publishers[target]
            refused |= self.requests.send_requests(publisher.send, publisher.requests(messages))
        done = []
        for letter, original in chosen:
            if original.key in refused:
                moving.refused[letter.message_id] = str(refused[original.key])
            elif letter.message_id not in moving.refused:
                done.append((letter, original))
        return done

    def _delete(
        self, chosen: Sequence[tuple[DeadLetter, Received]], hidden: dict[str, str], moving: Moving
    ) -> None:
        entries = [(original.key, original.receipt) for _, original in chosen]
        refused = self.requests.send(self.dead.remove, entries)
        for letter, original in chosen:
            if original.key in refused:
                moving.refused[letter.message_id] = str(refused[original.key])
            else:
                del hidden[original.key]
                moving.count += 1


def attempt_of(text: str) -> int:
    """Parses the attempt recorded in a dead letter; 1 if there is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1
