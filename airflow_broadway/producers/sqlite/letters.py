"""The dead letters of an embedded queue, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, Moved
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.sqlite.queue import SqliteQueue

__all__ = ["SqliteDeadLetters"]

#: Letters that are read at a time.
_PORTION = 100


class SqliteDeadLetters:
    """Those of one queue, which lie in its file: each is in exactly one place, whoever is killed.

    A :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.
    """

    def __init__(self, queue: SqliteQueue) -> None:
        self._queue = queue

    @property
    def place(self) -> str:
        return f"queue {self._queue.name!r} in {self._queue.path}"

    def count(self) -> int:
        return self._queue.depth().dead

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        after: DeadLetter | None = None
        while found := self._queue.dead_letters(limit=_PORTION, choice=choice, after=after):
            yield from found
            after = found[-1]

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        if to not in (None, self._queue.name):
            raise ProducerError(
                f"the dead letters of the embedded queue {self._queue.name!r} lie in its own file"
                f" and go back to it, not to {to!r}: leave --to out"
            )
        return self._moved(choice, self._queue.requeue_dead)

    def delete(self, choice: Choice = EVERY) -> Moved:
        return self._moved(choice, self._queue.purge_dead)

    def close(self) -> None:
        self._queue.close()

    def _moved(self, choice: Choice, move: Callable[[Choice], int]) -> Moved:
        # Named ones are looked up first: what vanishes between the two is in neither number.
        named = choice.ids or frozenset()
        there = self._queue.dead_among(named, choice=choice) if named else set()
        return Moved(move(choice), tuple(sorted(named - there)))
