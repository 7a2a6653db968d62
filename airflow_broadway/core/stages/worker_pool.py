"""Threads that work side by side: each free one gets the next piece, or each its own lane.

Nothing is queued behind a busy worker while another is free: a piece goes to the worker that has
been free for longest, unless order binds it: to the worker of its lane, or to the one that is at an
earlier piece with one of its keys.  The number of pieces under way is bounded, so memory is flat
whatever is fed in.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from airflow_broadway.core.log_context import keep_ids

P = TypeVar("P")
R = TypeVar("R")

_STOP = object()


class _Worker(Generic[P, R]):
    """One thread and the pieces that wait for it: only those of its own lane ever do."""

    def __init__(self, name: str, work: Callable[[P], R], pool: WorkerPool[P, R]) -> None:
        self.queue: deque[Any] = deque()
        self.wake = threading.Semaphore(0)
        self._work = work
        self._pool = pool
        # Daemonic, so that a callback that never returns cannot keep the process alive.
        self.thread = threading.Thread(target=keep_ids(self._run), name=name, daemon=True)
        self.thread.start()

    def put(self, entry: Any) -> None:
        self.queue.append(entry)
        self.wake.release()

    def _run(self) -> None:
        while True:
            self.wake.acquire()
            entry = self.queue.popleft()
            if entry is _STOP:
                return
            ticket, piece = entry
            try:
                result: Any = self._work(piece)
            except BaseException as error:
                self._pool.finished(self, ticket, None, error)
            else:
                self._pool.finished(self, ticket, result, None)


class WorkerPool(Generic[P, R]):
    """One thread per function in ``work``; fed and emptied from one thread.

    :param work: What each worker does with a piece.
    :param ordered: Give results in the order of :meth:`put`; else as they are finished.
    :param waiting: Pieces that may wait for the worker of their lane, per worker; at least 0.
    :param unread: Finished results that may wait to be taken, per worker; at least 1.
    """

    def __init__(
        self,
        work: Sequence[Callable[[P], R]],
        *,
        name: str = "broadway",
        ordered: bool = True,
        waiting: int = 2,
        unread: int = 8,
    ) -> None:
        self._change = threading.Condition()
        self._ordered = ordered
        self._waiting = waiting
        self._bound = len(work) * unread
        self._error: BaseException | None = None
        self._given = 0  # tickets handed out
        self._taken = 0  # results taken
        self._done: dict[int, R] = {}
        self._pieces: dict[int, P] = {}  # ticket → its piece, until its result is taken
        self._keys: dict[int, Sequence[Hashable]] = {}  # ticket → its keys, while under way
        self._at: dict[Hashable, tuple[_Worker[P, R], int]] = {}  # key → its worker, its pieces
        self._workers = [
            _Worker(f"{name}-{index}", function, self) for index, function in enumerate(work)
        ]
        self._load = dict.fromkeys(self._workers, 0)
        self._free: deque[_Worker[P, R]] = deque(self._workers)

    @property
    def under_way(self) -> int:
        """Pieces put whose results have not been taken."""
        return self._given - self._taken

    def put(
        self,
        piece: P,
        lane: int | None = None,
        keys: Sequence[Hashable] = (),
        timeout: float | None = None,
    ) -> bool:
        """Hand over one piece; waits until a worker takes it.

        :param lane: Pieces of one lane are worked on in order, by the worker of that number.
        :param keys: Pieces that share a key are worked on in order; for pieces without a lane.
        :param timeout: Seconds to wait; ``None``: without bound.
        :returns: Whether it was handed over.
        :raises BaseException: What a worker could not handle.
        """
        with self._change:
            if not self._change.wait_for(lambda: self._ready(lane, keys), timeout):
                return False
            self._raise()
            worker = self._bound_to(lane, keys)
            if worker is None:
                worker = self._free.popleft()
            elif not self._load[worker]:
                self._free.remove(worker)
            self._load[worker] += 1
            ticket = self._given
            self._given += 1
            self._pieces[ticket] = piece
            if keys:
                self._keys[ticket] = keys
                for key in keys:
                    known = self._at.get(key)
                    self._at[key] = (worker, 1 if known is None else known[1] + 1)
        worker.put((ticket, piece))
        return True

    def wait_for(self, lane: int | None = None, timeout: float | None = None) -> bool:
        """Wait until :meth:`put` would hand over at once or :meth:`take` has something.

        :returns: Whether that came within ``timeout`` seconds.
        """
        with self._change:
            return self._change.wait_for(lambda: self._ready(lane, ()) or self._news(), timeout)

    def _ready(self, lane: int | None, keys: Sequence[Hashable]) -> bool:
        if self._error is not None:
            return True
        if self._ordered and self._given - self._taken >= self._bound:
            return False
        if keys and len({self._at[key][0] for key in keys if key in self._at}) > 1:
            return False  # bound to two workers: wait until all but one are done
        worker = self._bound_to(lane, keys)
        return bool(self._free) if worker is None else self._load[worker] <= self._waiting

    def _bound_to(self, lane: int | None, keys: Sequence[Hashable]) -> _Worker[P, R] | None:
        if lane is not None:
            return self._workers[lane]
        return next((self._at[key][0] for key in keys if key in self._at), None)

    def take(self) -> list[tuple[P, R]]:
        """What is finished and may be taken now; never waits.

        :raises BaseException: What a worker could not handle.
        """
        with self._change:
            self._raise()
            if self._ordered:
                taken = []
                while self._taken in self._done:
                    taken.append(self._pair(self._taken))
                    self._taken += 1
            else:
                taken = [self._pair(ticket) for ticket in sorted(self._done)]
                self._taken += len(taken)
            if taken:
                self._change.notify_all()
            return taken

    def _pair(self, ticket: int) -> tuple[P, R]:
        return self._pieces.pop(ticket), self._done.pop(ticket)

    def left(self) -> tuple[list[tuple[P, R]], list[P]]:
        """All that was not taken, in order of :meth:`put`: results, and pieces without one.

        For whoever takes nothing more: a result that comes after this is nobody's.
        """
        with self._change:
            done = [self._pair(ticket) for ticket in sorted(self._done)]
            return done, [self._pieces[ticket] for ticket in sorted(self._pieces)]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until :meth:`take` has something or nothing is under way; whether that came."""
        with self._change:
            return self._change.wait_for(self._news, timeout)

    def _news(self) -> bool:
        if self._error is not None or self._given == self._taken:
            return True
        return self._taken in self._done if self._ordered else bool(self._done)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def finished(
        self,
        worker: _Worker[P, R],
        ticket: int,
        result: Any,
        error: BaseException | None,
    ) -> None:
        """Take note of a piece that a worker is done with; called by the workers."""
        with self._change:
            if error is not None:
                self._error = self._error or error
            else:
                self._done[ticket] = result
            for key in self._keys.pop(ticket, ()):
                at, count = self._at[key]
                if count > 1:
                    self._at[key] = (at, count - 1)
                else:
                    del self._at[key]
            self._load[worker] -= 1
            if not self._load[worker]:
                self._free.append(worker)
            self._change.notify_all()

    def close(self, timeout: float = 0.0) -> None:
        """Tell the workers to end after what they have; waits ``timeout`` seconds for each."""
        for worker in self._workers:
            worker.put(_STOP)
        for worker in self._workers:
            worker.thread.join(timeout)
