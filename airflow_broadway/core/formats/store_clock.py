"""The clock of the staging folder: one clock for the deadlines of leases on all hosts.

A deadline is written by one host and judged by others.  Hosts' clocks differ; the staging folder is
one.  Each task compares its host's clock with the modification time that the folder's file system
gives to a file of the task's own.  Runs on the Spark driver too.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import Files

log = logging.getLogger(__name__)

#: Seconds between two modification times that a file system can tell apart: of object stores, and
#: of disks, whose kernels take the time of the last tick.
_COARSE: Final = 1.0
_FINE: Final = 0.05
#: The share of a lease above which a difference is reported.
_REPORTED: Final = 0.1


#: Seconds of a difference between wall and monotonic clock that is a jump and not an adjustment.
_JUMP: Final = 1.0


class StoreClock:
    """A host's clock, corrected by its difference from the clock of the staging folder.

    The difference holds until the host's wall clock jumps, or the host was suspended: then wall and
    monotonic clock differ by another amount than before, and it is measured again.

    :param offset: Seconds to add to the host's time.
    :param measure: Measures ``offset`` again; ``None`` for a clock that never jumps.
    :param place: The folder's address, for people.
    """

    def __init__(
        self,
        host: Clock,
        offset: float,
        measure: Callable[[], float] | None = None,
        *,
        place: str = "",
    ) -> None:
        self._host = host
        self._offset = timedelta(seconds=offset)
        self._measure = measure
        self._place = place
        self._gap = self._measured_gap()
        self._measuring = threading.Lock()

    def now(self) -> datetime:
        """Return the time of the staging folder: aware, UTC."""
        if self._measure is not None and abs(self._measured_gap() - self._gap) > _JUMP:
            self._measure_again(self._measure)
        return self._host.now() + self._offset

    def monotonic(self) -> float:
        """Return seconds from a fixed but arbitrary origin; never goes back."""
        return self._host.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._host.sleep(seconds)

    def _measured_gap(self) -> float:
        """The seconds between the host's wall clock and its monotonic one."""
        return self._host.now().timestamp() - self._host.monotonic()

    def _measure_again(self, measure: Callable[[], float]) -> None:
        with self._measuring:
            gap = self._measured_gap()
            jump = gap - self._gap
            if abs(jump) <= _JUMP:
                return  # another thread has measured it
            try:
                self._offset = timedelta(seconds=measure())
                then = f"the time of the staging folder {self._place} was measured again"
            except StagingError as error:
                self._offset -= timedelta(seconds=jump)
                then = f"time is kept by the monotonic clock: {error}"
            self._gap = gap
        log.warning(
            "The clock of host %r jumped by %+.0f s, or the host was suspended; %s.  Deadlines of"
            " leases are judged by the folder's clock.",
            socket.gethostname(),
            jump,
            then,
        )


def store_clock(
    files: Files,
    path: str,
    write: Callable[[], object],
    lease: float,
    clock: Clock,
    *,
    place: str,
    report: bool = True,
) -> Clock:
    """Return the clock by which to judge deadlines, corrected where the host's is wrong.

    :param path: A file in the staging folder.
    :param write: Writes it.
    :param lease: Seconds of the lease.
    :param clock: The host's.
    :param place: The folder's address, for people.
    :param report: Whether to log a difference above a tenth of the lease.
    :raises StagingError: If the folder cannot be used, or the clocks differ and the difference is
        not known well enough for the lease.
    """

    def measure() -> float | None:
        return _measure(files, path, write, lease, clock, place)

    offset = measure()
    if offset is None:
        return clock
    made = StoreClock(clock, offset, lambda: measure() or 0.0, place=place)
    if report and abs(offset) > _REPORTED * lease:
        log.warning(
            "%s: %s here, %s there.  Deadlines of leases (%g s) are judged by the folder's"
            " clock; synchronize the host's.",
            _differs(offset, place, "The"),
            clock.now().isoformat(timespec="seconds"),
            made.now().isoformat(timespec="seconds"),
            lease,
        )
    return made


def _measure(
    files: Files,
    path: str,
    write: Callable[[], object],
    lease: float,
    clock: Clock,
    place: str,
) -> float | None:
    """The seconds by which the folder is ahead, 0 if the host may be right; ``None`` where a store
    has no modification times.
    """
    before = clock.now()
    write()
    modified = files.modified(path)
    if modified is None:
        return None
    after = clock.now()
    step = _COARSE if modified.is_integer() else _FINE
    least, most = modified - after.timestamp(), modified + step - before.timestamp()
    if least <= 0.0 <= most:
        return 0.0
    offset, doubt = (least + most) / 2, most - least
    if doubt > lease / 2:
        raise StagingError(
            f"{_differs(offset, place, 'the')}, and that is known to {doubt:,.1f} s only, by the"
            f" time that writing a file took: a lease of {lease:g} s cannot be judged; synchronize"
            f" the host's clock, or set the producer's lease to at least {2 * doubt:,.0f} s"
        )
    return offset


def _differs(offset: float, place: str, the: str) -> str:
    ahead = f"{abs(offset):,.0f} s {'ahead of' if offset < 0 else 'behind'}"
    host = socket.gethostname()
    return f"{the} clock of host {host!r} is {ahead} that of the staging folder {place}"
