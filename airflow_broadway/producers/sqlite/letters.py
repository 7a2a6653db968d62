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
        place = f"queue {self._queue.name!r} in {self._queue.path}"
        there = self._queue.name in (self._queue.names() or ())
        return place if there else f"{place}, to which nothing was sent yet"

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
        _check_there(self._queue)
        # Named ones are looked up first: what vanishes between the two is in neither number.
        named = choice.ids or frozenset()
        there = self._queue.dead_among(named, choice=choice) if named else set()
        return Moved(move(choice), tuple(sorted(named - there)))


def _check_there(queue: SqliteQueue) -> None:
    """Refuses to move letters of a file, or a name, that nothing was ever sent to.

    :raises ProducerError: Naming the queues that there are.
    """
    names = queue.names()
    if names is None:
        raise ProducerError(f"there is no queue file {queue.path}: correct the path")
    if queue.name not in names:
        raise ProducerError(
            f"the queue file {queue.path} has no queue {queue.name!r}; it has {names}"
        )
