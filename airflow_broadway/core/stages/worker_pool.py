"""Concurrent threads: each idle one gets the next piece of work, or each its own lane.

Nothing is queued behind a busy worker while another is idle: a piece goes to the worker that has
been idle longest, unless order binds it: to the worker of its lane, or to the one that handles an
earlier piece with one of its keys.  The number of pieces in process is bounded, so memory use is
constant, whatever the input.
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
    """One thread and its queue, which only holds pieces of its own lane or keys."""

    def __init__(self, name: str, work: Callable[[P], R], pool: WorkerPool[P, R]) -> None:
        self.queue: deque[Any] = deque()
        self.wake = threading.Semaphore(0)
        self._work = work
        self._pool = pool
        # A daemon, so that a callback that never returns cannot keep the process alive.
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

    :param work: The function of each worker, called with a piece.
    :param ordered: Return results in the order of :meth:`put`; else as they are finished.
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
        self._issued = 0  # tickets issued
        self._taken = 0  # results taken
        self._done: dict[int, R] = {}
        self._pieces: dict[int, P] = {}  # ticket → its piece, until its result is taken
        self._keys: dict[int, Sequence[Hashable]] = {}  # ticket → its keys, while in process
        self._at: dict[Hashable, tuple[_Worker[P, R], int]] = {}  # key → its worker, its pieces
        self._workers = [
            _Worker(f"{name}-{index}", function, self) for index, function in enumerate(work)
        ]
        self._load = dict.fromkeys(self._workers, 0)
        self._free: deque[_Worker[P, R]] = deque(self._workers)

    @property
    def under_way(self) -> int:
        """The number of pieces put whose results have not been taken."""
        return self._issued - self._taken

    def put(
        self,
        piece: P,
        lane: int | None = None,
        keys: Sequence[Hashable] = (),
        timeout: float | None = None,
    ) -> bool:
        """Hands over one piece; waits until a worker takes it.

        :param lane: Pieces of one lane are handled in order, by the worker of that number.
        :param keys: Pieces that share a key are handled in order; for pieces without a lane.
        :param timeout: Seconds to wait; ``None``: unlimited.
        :returns: Whether it was handed over.
        :raises BaseException: An exception of a worker's function.
        """
        with self._change:
            if not self._change.wait_for(lambda: self._ready(lane, keys), timeout):
                return False
            self._raise_error()
            worker = self._bound_to(lane, keys)
            if worker is None:
                worker = self._free.popleft()
            elif not self._load[worker]:
                self._free.remove(worker)
            self._load[worker] += 1
            ticket = self._issued
            self._issued += 1
            self._pieces[ticket] = piece
            if keys:
                self._keys[ticket] = keys
                for key in keys:
                    known = self._at.get(key)
                    self._at[key] = (worker, 1 if known is None else known[1] + 1)
        worker.put((ticket, piece))
        return True

    def wait_for(self, lane: int | None = None, timeout: float | None = None) -> bool:
        """Waits until :meth:`put` would hand over immediately or :meth:`take` has a result.

        :returns: Whether that happened within ``timeout`` seconds.
        """
        with self._change:
            return self._change.wait_for(
                lambda: self._ready(lane, ()) or self._has_result(), timeout
            )

    def _ready(self, lane: int | None, keys: Sequence[Hashable]) -> bool:
        if self._error is not None:
            return True
        if self._ordered and self._issued - self._taken >= self._bound:
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
        """Returns finished results that may be taken now; never waits.

        :raises BaseException: An exception of a worker's function.
        """
        with self._change:
            self._raise_error()
            if self._ordered:
                taken = []
                while self._taken in self._done:
                    taken.append(self._pop_result(self._taken))
                    self._taken += 1
            else:
                taken = [self._pop_result(ticket) for ticket in sorted(self._done)]
                self._taken += len(taken)
            if taken:
                self._change.notify_all()
            return taken

    def _pop_result(self, ticket: int) -> tuple[P, R]:
        return self._pieces.pop(ticket), self._done.pop(ticket)

    def left(self) -> tuple[list[tuple[P, R]], list[P]]:
        """Returns everything not taken, in order of :meth:`put`: results, and pieces without one.

        For callers that take nothing more: later results are discarded.
        """
        with self._change:
            done = [self._pop_result(ticket) for ticket in sorted(self._done)]
            return done, [self._pieces[ticket] for ticket in sorted(self._pieces)]

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until :meth:`take` has a result or nothing is in process; returns whether so."""
        with self._change:
            return self._change.wait_for(self._has_result, timeout)

    def _has_result(self) -> bool:
        if self._error is not None or self._issued == self._taken:
            return True
        return self._taken in self._done if self._ordered else bool(self._done)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def finished(
        self,
        worker: _Worker[P, R],
        ticket: int,
        result: Any,
        error: BaseException | None,
    ) -> None:
        """Records the result of a piece; called by the workers."""
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
        """Ends the workers after their queued pieces; waits ``timeout`` seconds for each."""
        for worker in self._workers:
            worker.put(_STOP)
        for worker in self._workers:
            worker.thread.join(timeout)
