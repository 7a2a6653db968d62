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
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from airflow_broadway.core.log_context import keep_ids

P = TypeVar("P")
R = TypeVar("R")


class _Worker:
    """The state of one thread, which is started at its first piece."""

    def __init__(self, run: Callable[[_Worker], None], name: str) -> None:
        #: Tickets of pieces of its own lane or keys only; ``None`` ends the thread.
        self.queue: SimpleQueue[int | None] = SimpleQueue()
        #: The number of pieces in its queue and in its hands.
        self.load = 0
        # A daemon, so that a callback that never returns cannot keep the process alive.
        self.thread = threading.Thread(target=keep_ids(run), args=(self,), name=name, daemon=True)


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
        self._keyed: dict[int, tuple[_Worker, frozenset[Hashable]]] = {}  # those in process
        self._workers = [
            _Worker(partial(self._run, function), f"{name}-{index}")
            for index, function in enumerate(work)
        ]
        self._free = deque(self._workers)

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
            bound = self._bound_to(lane, keys)
            worker = bound.pop() if bound else self._free[0]
            if not worker.load:
                self._free.remove(worker)
            worker.load += 1
            ticket = self._issued
            self._issued += 1
            self._pieces[ticket] = piece
            if keys:
                self._keyed[ticket] = worker, frozenset(keys)
        worker.queue.put(ticket)
        if worker.thread.ident is None:
            worker.thread.start()
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
        if self._ordered and self.under_way >= self._bound:
            return False
        bound = self._bound_to(lane, keys)
        if not bound:
            return bool(self._free)
        # Bound to two workers: wait until all but one are done.
        return len(bound) == 1 and all(worker.load <= self._waiting for worker in bound)

    def _bound_to(self, lane: int | None, keys: Sequence[Hashable]) -> set[_Worker]:
        if lane is not None:
            return {self._workers[lane]}
        return {worker for worker, own in self._keyed.values() if not own.isdisjoint(keys)}

    def take(self) -> list[tuple[P, R]]:
        """Returns finished results that may be taken now; never waits.

        :raises BaseException: An exception of a worker's function.
        """
        with self._change:
            self._raise_error()
            tickets = sorted(self._done)
            if self._ordered:
                tickets = [ticket for n, ticket in enumerate(tickets) if ticket == self._taken + n]
            self._taken += len(tickets)
            if tickets:
                self._change.notify_all()
            return [self._pop_result(ticket) for ticket in tickets]

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
        if self._error is not None or not self.under_way:
            return True
        return self._taken in self._done if self._ordered else bool(self._done)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, function: Callable[[P], R], worker: _Worker) -> None:
        """Handles pieces; the body of each thread."""
        while (ticket := worker.queue.get()) is not None:
            done: dict[int, R] = {}
            error: BaseException | None = None
            try:
                done[ticket] = function(self._pieces[ticket])
            except BaseException as raised:
                error = raised
            with self._change:
                self._done |= done
                self._error = self._error or error
                self._keyed.pop(ticket, None)
                worker.load -= 1
                if not worker.load:
                    self._free.append(worker)
                self._change.notify_all()

    def close(self) -> None:
        """Ends the workers after their queued pieces; does not wait for them."""
        for worker in self._workers:
            worker.queue.put(None)
