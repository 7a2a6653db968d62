"""Lists, requeues and deletes dead letters at a broker that shows a message only by delivering it.

Listing hides letters from other consumers for a while, and counts as a delivery.  What is not moved
becomes visible again immediately.  A letter is deleted once the broker has accepted its message, so
that a kill leaves it in both places at most; there it is a new message to the broker, and received
as redelivered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
    Client,
    Hidden,
    Publisher,
    Received,
    Refusal,
)
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.kit.looks import LookCount


class _Walk:
    """One walk through the letters."""

    def __init__(self, letters: EngineDeadLetters) -> None:
        self._letters = letters
        #: Hidden from others: id → receipt.
        self.hidden: dict[str, str] = {}
        self._known: set[str] = set()

    def batches(self) -> Iterator[list[Received]]:
        """Yields each letter once."""
        while found := self._letters.fetch():
            self.hidden |= {each.key: each.receipt for each in found}
            fresh = [each for each in found if each.key not in self._known]
            self._known |= {each.key for each in fresh}
            if not fresh:  # it has lasted so long that the first are visible again
                return
            yield fresh

    def show_again(self) -> None:
        """Makes hidden letters visible; if that fails, the broker does so in a while."""
        with suppress(ProducerError):
            self._letters.show(self.hidden)


class EngineDeadLetters(ABC):
    """The letters in one place; a :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.

    :param source: The broker of the queue that the pipeline drains; closed with this.
    :param dead: The queue of the letters.
    :param place: The place, for people.
    """

    #: Seconds for which letters are hidden while they are listed.
    hidden_seconds: ClassVar[int] = 300

    def __init__(self, source: Broker[Any], dead: Client, place: str) -> None:
        self._source = source
        self._letters = dead
        self.requests = BatchRequests(source, 1)
        self._place = place
        #: Where letters are sent back to.
        self._publishers: dict[str, Publisher] = {}

    @property
    def place(self) -> str:
        return self._place

    def close(self) -> None:
        self.requests.close()
        self._source.close()

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

    def show(self, receipts: Mapping[str, str]) -> None:
        """Makes hidden letters visible."""
        entries = ((key, Hidden(receipt, 0)) for key, receipt in receipts.items())
        self.requests.send(self._letters.hide, entries)

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """See :meth:`.DeadLetters.letters`."""
        walk, looks = _Walk(self), self._looks()
        looks.begin()
        try:
            for batch in walk.batches():
                for each in batch:
                    looks.note(each.deliveries)
                    letter = self.letter(each)
                    if choice.takes(letter):
                        yield letter
            looks.end()
        finally:
            walk.show_again()

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """See :meth:`.DeadLetters.requeue`."""
        return self._moved(choice, send=True, to=to)

    def delete(self, choice: Choice = EVERY) -> Moved:
        """See :meth:`.DeadLetters.delete`."""
        return self._moved(choice, send=False)

    def _looks(self) -> LookCount:
        limit, setting = self.limit()
        return LookCount(self._source.env.staging, f"the {self._place}", limit, setting)

    def _moved(self, choice: Choice, *, send: bool, to: str | None = None) -> Moved:
        walk, moving = _Walk(self), Moving(choice)
        looks = None if choice == EVERY else self._looks()
        if looks is not None:
            looks.begin()
        try:
            for batch in walk.batches():
                if looks is not None:
                    looks.note(max(each.deliveries for each in batch))
                chosen = [
                    (letter, each)
                    for letter, each in ((self.letter(each), each) for each in batch)
                    if moving.takes(letter)
                ]
                if send:
                    chosen = self._sent(chosen, moving, to)
                self._delete(chosen, walk, moving)
        finally:
            walk.show_again()
        return moving.result()

    def _sent(
        self, chosen: Sequence[tuple[DeadLetter, Received]], moving: Moving, to: str | None
    ) -> list[tuple[DeadLetter, Received]]:
        """Sends letters back; returns those that the broker has accepted."""
        by_target: dict[str, dict[str, Any]] = {}
        for letter, each in chosen:
            try:
                target = destination_of(letter, [self._source.name], to)
                if target not in self._publishers:
                    self._publishers[target] = self.publisher(target)
                message = self.back(letter, each, target)
            except BroadwayError as error:
                moving.refused[letter.message_id] = str(error)
                continue
            by_target.setdefault(target, {})[each.key] = message
        refused: dict[str, Refusal] = {}
        for target, messages in by_target.items():
            publisher = self._publishers[target]
            refused |= self.requests.send_requests(publisher.send, publisher.requests(messages))
        done = []
        for letter, each in chosen:
            if each.key in refused:
                moving.refused[letter.message_id] = str(refused[each.key])
            elif letter.message_id not in moving.refused:
                done.append((letter, each))
        return done

    def _delete(
        self, chosen: Sequence[tuple[DeadLetter, Received]], walk: _Walk, moving: Moving
    ) -> None:
        entries = [(each.key, each.receipt) for _, each in chosen]
        refused = self.requests.send(self._letters.remove, entries)
        for letter, each in chosen:
            if each.key in refused:
                moving.refused[letter.message_id] = str(refused[each.key])
            else:
                del walk.hidden[each.key]
                moving.count += 1


def attempt_of(text: str) -> int:
    """Reads the attempt that a letter states; 1 where it states none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1
