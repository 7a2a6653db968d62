"""Dead letters at a broker that shows a message only by receiving it.

Whoever looks hides letters from others for a while.  What is not moved is shown again at once.  A
letter is deleted once the broker has taken its message, so that whoever is killed leaves it in both
places at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, Moved, Moving
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.kit.looks import LookCount
from airflow_broadway.producers.kit.receipts.batch_requests import Refusal

__all__ = ["Looking", "ReceivedLetters"]


class Looking(Protocol):
    """One walk through the letters."""

    def batches(self) -> Iterator[Sequence[Any]]:
        """What lies there, each letter once, as the broker hands it out."""
        ...

    def gone(self, key: str) -> None:
        """A letter lies there no more."""
        ...

    def show_again(self) -> None:
        """Show at once what was hidden; if that fails, the broker does so in a while."""
        ...


class ReceivedLetters(ABC):
    """What is done with letters alike; a broker says how it is asked.

    Most of a :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.
    """

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """See :meth:`.DeadLetters.letters`."""
        looking, looks = self._looking(), self._looks()
        looks.begin()
        try:
            for batch in looking.batches():
                for raw in batch:
                    looks.note(self._deliveries(raw))
                    letter = self._letter(raw)
                    if choice.takes(letter):
                        yield letter
            looks.end()
        finally:
            looking.show_again()

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """See :meth:`.DeadLetters.requeue`."""
        return self._moved(choice, send=True, to=to)

    def delete(self, choice: Choice = EVERY) -> Moved:
        """See :meth:`.DeadLetters.delete`."""
        return self._moved(choice, send=False)

    # -- what a broker says --------------------------------------------------------------------

    @abstractmethod
    def _looking(self) -> Looking:
        """Begin a walk."""

    @abstractmethod
    def _looks(self) -> LookCount:
        """The count of looks against the limit that the place for dead letters has itself."""

    @abstractmethod
    def _deliveries(self, raw: Any) -> int:
        """How often the broker has handed a letter out, this time included."""

    @abstractmethod
    def _letter(self, raw: Any) -> DeadLetter:
        """What the broker hands out, as a letter."""

    @abstractmethod
    def _key(self, raw: Any) -> str:
        """The broker's own id of a letter."""

    @abstractmethod
    def _back(self, letter: DeadLetter, raw: Any, to: str | None) -> tuple[str, dict[str, Any]]:
        """Where a letter is to be sent, and what; see :func:`.destination_of`.

        :raises BroadwayError: If it cannot be sent back.
        """

    @abstractmethod
    def _send(self, target: str, made: Mapping[str, dict[str, Any]]) -> Mapping[str, str]:
        """Send what :meth:`_back` made, by key; why some were refused, by key."""

    @abstractmethod
    def _delete(self, raws: Sequence[Any]) -> Mapping[str, Refusal]:
        """Delete letters; which were refused, by key."""

    # -- moving --------------------------------------------------------------------------------

    def _moved(self, choice: Choice, *, send: bool, to: str | None = None) -> Moved:
        looking, moving = self._looking(), Moving(choice)
        looks = None if choice == EVERY else self._looks()
        if looks is not None:
            looks.begin()
        try:
            for batch in looking.batches():
                if looks is not None:
                    looks.note(max(map(self._deliveries, batch)))
                chosen = [
                    (letter, raw)
                    for letter, raw in ((self._letter(raw), raw) for raw in batch)
                    if moving.takes(letter)
                ]
                if send:
                    chosen = self._sent(chosen, moving, to)
                self._deleted(chosen, looking, moving)
        finally:
            looking.show_again()
        return moving.result()

    def _sent(
        self, chosen: Sequence[tuple[DeadLetter, Any]], moving: Moving, to: str | None
    ) -> list[tuple[DeadLetter, Any]]:
        """Send them back; those that the broker has taken."""
        by_target: dict[str, dict[str, dict[str, Any]]] = {}
        for letter, raw in chosen:
            try:
                target, made = self._back(letter, raw, to)
            except BroadwayError as error:
                moving.refused[letter.message_id] = str(error)
                continue
            by_target.setdefault(target, {})[self._key(raw)] = made
        refused: dict[str, str] = {}
        for target, messages in by_target.items():
            refused |= self._send(target, messages)
        done = []
        for letter, raw in chosen:
            why_not = refused.get(self._key(raw))
            if why_not is not None:
                moving.refused[letter.message_id] = why_not
            elif letter.message_id not in moving.refused:
                done.append((letter, raw))
        return done

    def _deleted(
        self, chosen: Sequence[tuple[DeadLetter, Any]], looking: Looking, moving: Moving
    ) -> None:
        refused = self._delete([raw for _, raw in chosen])
        for letter, raw in chosen:
            key = self._key(raw)
            if key in refused:
                moving.refused[letter.message_id] = f"{refused[key].code}: {refused[key].text}"
            else:
                looking.gone(key)
                moving.count += 1
