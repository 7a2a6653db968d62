"""Intercepts every external call of this process, and injects a fault into one of them.

It exists in the process of one task execution, a fork that ends with it, so replaced attributes of
modules and classes are never restored.
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
from typing import Any, Protocol, TypeVar

from airflow_broadway.testing.crashes.points import (
    Call,
    Fault,
    Injection,
    Point,
    TargetNames,
    Traits,
)

R = TypeVar("R")

_HOUR = 3600.0
#: The timeout of a hanging call in seconds.
_TIME_OUT = 60.0
_NO_OTHERS: Mapping[Fault, Callable[[], Any]] = MappingProxyType({})


class Boundary(Protocol):
    """Replaces one kind of calls by intercepted ones."""

    def install(self, interceptor: Interceptor) -> None:
        """Replaces the calls; called once in the process of the execution, before its task."""


class Interceptor:
    """Counts the calls of one execution, and injects its fault.

    :param execution: ``run/task/try``.
    :param injections: Execution → fault; at most one each.
    :param clock_offset: Seconds by which this process's clock is ahead of the system clock.
    """

    def __init__(
        self,
        execution: str,
        injections: Mapping[str, Injection] | None = None,
        *,
        clock_offset: float = 0.0,
    ) -> None:
        self.execution = execution
        self.clock_offset = clock_offset
        #: Every call so far, in order.
        self.points: list[Point] = []
        #: Whether the fault has been injected.
        self.injected = False
        #: Called before the fault is injected, and after the call if that is made anyway.
        self.on_injection: Callable[[], None] = lambda: None
        #: Called when this process is resumed.
        self.on_resume: Callable[[], None] = lambda: None
        #: Seconds of waits that were skipped.
        self.skipped = 0.0
        self._injection = (injections or {}).get(execution)
        self._names = TargetNames()
        self._counts: Counter[Call] = Counter()
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._full = False
        # Timed-out calls that still take effect later.
        self._late: list[Callable[[], object]] = []

    # -- calls from boundaries -------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether this thread is within a call: nested calls are part of it."""
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
        disk_full: Callable[[], Exception] | None = None,
        timeout: Callable[[], BaseException] | None = None,
        late: bool = False,
        extra: Mapping[Fault, Callable[[], R]] = _NO_OTHERS,
    ) -> R:
        """Makes one external call, or injects the fault into it.

        :param half: Makes half of the call, if that is possible.
        :param changes: Whether the call has effects, rather than only reading.
        :param nested: Whether calls within it count too, as for callbacks.
        :param locked: Returns whether this process holds a lock that is released only by its death.
        :param error: Creates the exception of a failed call.
        :param lost: Creates the exception of a lost response; ``error`` by default.
        :param disk_full: Creates the exception of a full disk; ``None``: needs no space.
        :param timeout: Creates the exception of a timeout; ``None``: has no timeout.
        :param late: Whether a timed-out call may still take effect, after the next call.
        :param extra: Other faults of this call, with the functions that inject them.
        """
        if self.busy:
            return do()
        optional = {Fault.KILLED_HALFWAY: half, Fault.DISK_FULL: disk_full, Fault.TIME_OUT: timeout}
        actions: dict[Fault, Callable[[], Any]] = {
            fault: action for fault, action in optional.items() if action is not None
        }
        actions.update(extra)
        in_callback = nested or getattr(self._inside, "callback", False)
        with self._within(nested):
            call = Call(kind, self._names.normalize(target))
            traits = Traits(changes, ",".join(actions), locked(), in_callback=in_callback)
            nth, index = self._record(call, traits)
            if self._full and disk_full is not None:
                raise disk_full()
            injection = self._injection
            if injection is None or self.injected or injection.point[1:3] != (call, nth):
                result = do()
                self._do_late()
            else:
                result = self._inject(
                    injection.fault, do, actions, error=error, lost=lost or error, late=late
                )
            if locked():
                point = self.points[index]
                self.points[index] = point._replace(traits=traits._replace(locked_after=True))
            return result

    def pass_time(self, seconds: float) -> None:
        """Advances the clocks of this process."""
        self.clock_offset += seconds
        self.skipped += seconds

    def apply_later(self, do: Callable[[], object]) -> None:
        """Schedules a call after the next one; its result is discarded."""
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

    def _record(self, call: Call, traits: Traits) -> tuple[int, int]:
        """Records a call; returns its number among equal calls, and its index among all."""
        with self._lock:
            self._counts[call] += 1
            nth = self._counts[call]
            self.points.append(Point(self.execution, call, nth, traits))
            return nth, len(self.points) - 1

    # -- fault injection -------------------------------------------------------------------------

    def _inject(
        self,
        fault: Fault,
        do: Callable[[], R],
        actions: Mapping[Fault, Callable[[], Any]],
        *,
        error: Callable[[], Exception],
        lost: Callable[[], Exception],
        late: bool,
    ) -> R:
        """Injects a fault into a call.

        :param actions: The half of the call, the exceptions of a full disk and of a timeout, and
            what carries out other faults; of those that are possible here.
        """
        self.injected = True
        self.on_injection()
        if fault is Fault.KILLED_BEFORE:
            self._die()
        elif fault is Fault.KILLED_HALFWAY:
            actions[fault]()
            self._die()
        elif fault is Fault.ERROR:
            raise error()
        elif fault is Fault.TIME_OUT:
            self.pass_time(_TIME_OUT)
            if late:
                self.apply_later(do)
            raise actions[fault]()
        elif fault is Fault.DISK_FULL:
            self._full = True
            raise actions[fault]()
        elif fault in actions:
            otherwise: R = actions[fault]()
            return otherwise
        elif fault is Fault.SUSPENDED_BEFORE:
            self._suspend()
        elif fault is Fault.BROKER_RESTARTS:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault in (Fault.CLOCK_AHEAD, Fault.CLOCK_BEHIND):
            self.clock_offset += _HOUR if fault is Fault.CLOCK_AHEAD else -_HOUR
        result = do()
        self.on_injection()
        if fault is Fault.KILLED_AFTER:
            self._die()
        elif fault is Fault.SUSPENDED_AFTER:
            self._suspend()
        elif fault is Fault.RESPONSE_LOST:
            raise lost()
        return result

    def _do_late(self) -> None:
        """Makes the timed-out calls; their results are discarded."""
        while self._late:
            with suppress(Exception):
                self._late.pop()()

    def _die(self) -> None:
        """Kills this process as by ``kill -9``, without handlers or ``finally``."""
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)

    def _suspend(self) -> None:
        """Suspends all threads of this process until SIGCONT."""
        os.kill(os.getpid(), signal.SIGSTOP)
        self.on_resume()


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces an attribute by ``wrap`` of it."""
    setattr(owner, name, wrap(getattr(owner, name)))
