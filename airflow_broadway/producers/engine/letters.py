"""Lists, requeues and deletes dead letters at a broker that shows a message only by delivering it.

Listing hides letters from other consumers for a while, and counts as a delivery.  What is not moved
becomes visible again immediately.  A letter is deleted once the broker has accepted its message, so
that a kill leaves it in both places at most; there it is a new message to the broker, and received
as redelivered.
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
    """The letters in one place; a :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.

    :param source: The broker of the queue that the pipeline drains; closed with this.
    :param dead: The queue of the letters: a client of the same broker.
    """

    #: What a queue is called at the broker.
    word: ClassVar[str] = "queue"

    #: Seconds for which letters are hidden while they are listed.
    hidden_seconds: ClassVar[int] = 300

    def __init__(self, source: Broker[Any], dead: Any) -> None:
        self.source = source
        self.dead = dead
        self.requests = BatchRequests(source, 1)
        self._place = f"{self.word} {dead.name!r}"
        #: Where letters are sent back to.
        self._publishers: dict[str, Publisher] = {}

    @property
    def place(self) -> str:
        return self._place

    def close(self) -> None:
        self.requests.close()
        self.source.close()

    def count(self) -> int:
        """Counts by looking at each letter, where the broker does not count them."""
        return sum(1 for _ in self.letters())

    # -- what a broker says --------------------------------------------------------------------

    @abstractmethod
    def fetch(self) -> Sequence[Received]:
        """Receives some letters, hidden for :attr:`hidden_seconds`; none: that was all."""

    @abstractmethod
    def limit(self) -> tuple[int | None, str]:
        """Returns the deliveries after which the broker removes a letter (``None``: no limit), and
        the name of the setting.
        """

    @abstractmethod
    def letter(self, received: Received) -> DeadLetter:
        """Reads a letter."""

    @abstractmethod
    def publisher(self, name: str) -> Publisher:
        """Opens the queue that letters are sent back to.

        :raises BroadwayError: If there is none.
        """

    @abstractmethod
    def back(self, letter: DeadLetter, received: Received, to: str) -> Any:
        """Makes the message by which a letter is sent back.

        :raises BroadwayError: If it cannot be sent back.
        """

    # -- the calls -----------------------------------------------------------------------------

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
        """Makes the letters that a walk has hidden visible again; their receipts by id."""
        hidden: dict[str, str] = {}
        try:
            yield hidden
        finally:
            with suppress(ProducerError):  # the broker does so itself in a while
                entries = ((key, Hidden(receipt, 0)) for key, receipt in hidden.items())
                self.requests.send(self.dead.hide, entries)

    def _batches(self, hidden: dict[str, str]) -> Iterator[list[Received]]:
        """Walks through the letters: yields each once."""
        known: set[str] = set()
        while received := self.fetch():
            hidden |= {message.key: message.receipt for message in received}
            fresh = [message for message in received if message.key not in known]
            known |= {message.key for message in fresh}
            if not fresh:  # it has lasted so long that the first are visible again
                return
            yield fresh

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """See :meth:`.DeadLetters.requeue`."""
        return self._moved(choice, send=True, to=to)

    def delete(self, choice: Choice = EVERY) -> Moved:
        """See :meth:`.DeadLetters.delete`."""
        return self._moved(choice, send=False)

    def _looks(self) -> LookCount:
        limit, setting = self.limit()
        return LookCount(self.source.env.staging, f"the {self._place}", limit, setting)

    def _moved(self, choice: Choice, *, send: bool, to: str | None = None) -> Moved:
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
                    chosen = self._sent(chosen, moving, to)
                self._delete(chosen, hidden, moving)
        return moving.result()

    def _sent(
        self, chosen: Sequence[tuple[DeadLetter, Received]], moving: Moving, to: str | None
    ) -> list[tuple[DeadLetter, Received]]:
        """Sends letters back; returns those that the broker has accepted."""
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
    """Reads the attempt that a letter states; 1 where it states none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1
