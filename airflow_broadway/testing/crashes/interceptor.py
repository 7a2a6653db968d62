"""Sees every call by which this process touches the world, and strikes at one of them.

It lives in the process of one execution of a task, a fork that ends with it: what it replaces in
modules and classes is never put back.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from airflow_broadway.testing.crashes.points import Call, Names, Point, Strike, Traits, What

R = TypeVar("R")

_HOUR = 3600.0
#: Seconds until a call that hangs is given up.
_TIME_OUT = 60.0
_NO_OTHERS: Mapping[What, Callable[[], Any]] = MappingProxyType({})


class Boundary(Protocol):
    """Replaces the calls of one kind by those that tell the interceptor."""

    def install(self, interceptor: Interceptor) -> None:
        """Called once, in the process of the execution, before its task begins."""
        ...


class _Failures(NamedTuple):
    """What a call raises, in which case; see :meth:`Interceptor.call`."""

    error: Callable[[], Exception]
    lost: Callable[[], Exception]
    full: Callable[[], Exception] | None
    hangs: Callable[[], BaseException] | None
    late: bool
    others: Mapping[What, Callable[[], Any]]


class Interceptor:
    """Counts the calls of one execution, and strikes where it is told.

    :param execution: ``run/task/try``.
    :param strikes: What happens, by execution; at most one in each.
    :param ahead: Seconds by which this process's clock is ahead of the machine's.
    """

    def __init__(
        self, execution: str, strikes: Mapping[str, Strike] | None = None, *, ahead: float = 0.0
    ) -> None:
        self.execution = execution
        self.ahead = ahead
        #: Every call so far, in order.
        self.seen: list[Point] = []
        #: Whether the strike has happened.
        self.struck = False
        #: Called before this process dies or sleeps, or has been struck otherwise.
        self.on_strike: Callable[[], None] = lambda: None
        #: Called when this process wakes up.
        self.on_wake: Callable[[], None] = lambda: None
        #: Lets this process's clocks go on.
        self.pass_time: Callable[[float], None] = lambda seconds: None
        self._strike = (strikes or {}).get(execution)
        self._names = Names()
        self._counts: Counter[Call] = Counter()
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._full = False
        # What was given up, and is done all the same: later.
        self._late: list[Callable[[], object]] = []

    # -- what boundaries call --------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether this thread is within a call: what it calls in turn is part of it."""
        return getattr(self._inside, "call", False)

    def call(
        self,
        kind: str,
        target: str,
        do: Callable[[], R],
        *,
        half: Callable[[], object] | None = None,
        changes: bool = True,
        nested: bool = False,
        locked: Callable[[], bool] = lambda: False,
        error: Callable[[], Exception] = lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
        lost: Callable[[], Exception] | None = None,
        full: Callable[[], Exception] | None = None,
        hangs: Callable[[], BaseException] | None = None,
        late: bool = False,
        others: Mapping[What, Callable[[], R]] = _NO_OTHERS,
    ) -> R:
        """Do one call that touches the world, unless it is struck.

        :param half: Does half of it, where that can be.
        :param changes: Whether it changes the world, or only looks.
        :param nested: Whether the calls within it count as well: those of a callback.
        :param locked: Whether this process holds a lock that only its death ends.
        :param error: What it raises where it fails.
        :param lost: What it raises where its answer is lost; ``error`` unless given.
        :param full: What it raises where the disk is full; not given, it needs no room.
        :param hangs: What it raises once its time-out is over; not given, it has none.
        :param late: Whether what was given up so may be done all the same, later: after the next
            call, when the process has gone on.
        :param others: What else can happen to it, and what does it so.
        """
        if self.busy:
            return do()
        failures = _Failures(error, lost or error, full, hangs, late, others)
        own = nested or getattr(self._inside, "callback", False)
        with self._within(nested):
            call = Call(kind, self._names.plain(target))
            traits = Traits(
                changes,
                half is not None,
                full is not None,
                locked(),
                own=own,
                hangs=hangs is not None,
                others=",".join(others),
            )
            nth, place = self._seen(call, traits)
            if self._full and full is not None:
                raise full()
            strike = self._strike
            if strike is None or self.struck or strike.point[1:3] != (call, nth):
                came = do()
                self._do_late()
            else:
                self.struck = True
                came = self._struck(strike.what, do, half, failures)
            if locked():
                point = self.seen[place]
                self.seen[place] = point._replace(traits=traits._replace(locked_after=True))
            return came

    def do_later(self, do: Callable[[], object]) -> None:
        """Do it after the next call, when the process has gone on; nobody hears what comes."""
        self._late.append(do)

    @contextmanager
    def _within(self, nested: bool) -> Iterator[None]:
        before = getattr(self._inside, "callback", False)
        self._inside.call = not nested
        self._inside.callback = before or nested
        try:
            yield
        finally:
            self._inside.call = False
            self._inside.callback = before

    def _seen(self, call: Call, traits: Traits) -> tuple[int, int]:
        """Which of the equal calls it is, and its place among all."""
        with self._lock:
            self._counts[call] += 1
            nth = self._counts[call]
            self.seen.append(Point(self.execution, call, nth, traits))
            return nth, len(self.seen) - 1

    # -- striking --------------------------------------------------------------------------------

    def _struck(
        self,
        what: What,
        do: Callable[[], R],
        half: Callable[[], object] | None,
        failures: _Failures,
    ) -> R:
        if what is What.KILLED_BEFORE:
            self._die()
        elif what is What.KILLED_HALFWAY:
            assert half is not None, "this call is done wholly or not at all"
            half()
            self._die()
        elif what is What.ERROR:
            self.on_strike()
            raise failures.error()
        elif what is What.TIME_OUT:
            assert failures.hangs is not None, "this call has no time-out"
            self.on_strike()
            self.pass_time(_TIME_OUT)
            if failures.late:
                self.do_later(do)
            raise failures.hangs()
        elif what in failures.others:
            self.on_strike()
            otherwise: R = failures.others[what]()
            return otherwise
        elif what is What.DISK_FULL:
            self.on_strike()
            self._full = True
            if failures.full is not None:
                raise failures.full()
        elif what is What.ASLEEP_BEFORE:
            self._sleep()
        elif what is What.BROKER_RESTARTS:
            self.on_strike()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what in (What.CLOCK_AHEAD, What.CLOCK_BEHIND):
            self.on_strike()
            self.ahead += _HOUR if what is What.CLOCK_AHEAD else -_HOUR
        came = do()
        if what is What.KILLED_AFTER:
            self._die()
        elif what is What.ASLEEP_AFTER:
            self._sleep()
        elif what is What.ANSWER_LOST:
            self.on_strike()
            raise failures.lost()
        return came

    def _do_late(self) -> None:
        """Do what was given up before; nobody hears what comes of it."""
        while self._late:
            with suppress(Exception):
                self._late.pop()()

    def _die(self) -> None:
        """As by ``kill -9``: no handler runs, and no ``finally``."""
        self.on_strike()
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)

    def _sleep(self) -> None:
        """All threads of the process stand still until somebody continues it."""
        self.on_strike()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.on_wake()


def replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    """Put what ``made`` makes of an attribute in its place."""
    setattr(owner, name, made(getattr(owner, name)))
