"""The clock of the staging folder: one clock for lease deadlines on all hosts.

One host writes a deadline, and others judge it.  Hosts' clocks differ; the staging folder has one
clock.  Each task compares its host's clock with the modification time that the folder's file system
assigns to a file of the task.  Runs in the Spark driver, too.
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

#: The resolution of modification times in seconds: of object stores, and of disks, whose kernels
#: use the time of the last tick.
_COARSE: Final = 1.0
_FINE: Final = 0.05
#: The share of a lease above which a clock difference is logged.
_REPORTED: Final = 0.1


#: A change in seconds between wall and monotonic clock that is a jump and not an adjustment.
_JUMP: Final = 1.0


class StoreClock:
    """A host's clock, corrected by its difference from the clock of the staging folder.

    The difference is valid until the host's wall clock jumps, or the host is suspended: then the
    gap between wall and monotonic clock changes, and the difference is measured again.

    :param offset: Seconds to add to the host's time.
    :param measure: Measures ``offset`` again; ``None`` for a clock that never jumps.
    :param place: The folder's address, for display.
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
        self._gap = self._measure_gap()
        self._measuring = threading.Lock()

    def now(self) -> datetime:
        """Returns the time of the staging folder: aware, UTC."""
        if self._measure is not None and abs(self._measure_gap() - self._gap) > _JUMP:
            self._measure_again(self._measure)
        return self._host.now() + self._offset

    def monotonic(self) -> float:
        """Returns seconds from a fixed but arbitrary origin; never decreases."""
        return self._host.monotonic()

    def sleep(self, seconds: float) -> None:
        """Blocks for ``seconds``."""
        self._host.sleep(seconds)

    def _measure_gap(self) -> float:
        """Returns the seconds between the host's wall clock and its monotonic clock."""
        return self._host.now().timestamp() - self._host.monotonic()

    def _measure_again(self, measure: Callable[[], float]) -> None:
        with self._measuring:
            gap = self._measure_gap()
            jump = gap - self._gap
            if abs(jump) <= _JUMP:
                return  # another thread has measured it
            try:
                self._offset = timedelta(seconds=measure())
                action = f"the time of the staging folder {self._place} was measured again"
            except StagingError as error:
                self._offset -= timedelta(seconds=jump)
                action = f"time is kept by the monotonic clock: {error}"
            self._gap = gap
        log.warning(
            "The clock of host %r jumped by %+.0f s, or the host was suspended; %s.  Deadlines of"
            " leases are judged by the folder's clock.",
            socket.gethostname(),
            jump,
            action,
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
    """Returns the clock that judges deadlines, corrected where the host's is wrong.

    :param path: A file in the staging folder.
    :param write: Writes that file.
    :param lease: The duration of the lease in seconds.
    :param clock: The host's clock.
    :param place: The folder's address, for display.
    :param report: Whether to log a difference above a tenth of the lease.
    :raises StagingError: If the folder cannot be used, or the clocks differ by an amount that
        cannot be measured precisely enough for the lease.
    """

    def measure() -> float | None:
        """Returns the seconds by which the folder is ahead, 0 if the host may be right; ``None``
        for a store without modification times.
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
                f"{_describe(offset, place, 'the')}, and that is known to {doubt:,.1f} s only, by"
                f" the time that writing a file took: a lease of {lease:g} s cannot be judged;"
                " synchronize the host's clock, or set the producer's lease to at least"
                f" {2 * doubt:,.0f} s"
            )
        return offset

    offset = measure()
    if offset is None:
        return clock
    corrected = StoreClock(clock, offset, lambda: measure() or 0.0, place=place)
    if report and abs(offset) > _REPORTED * lease:
        log.warning(
            "%s: %s here, %s there.  Deadlines of leases (%g s) are judged by the folder's"
            " clock; synchronize the host's.",
            _describe(offset, place, "The"),
            clock.now().isoformat(timespec="seconds"),
            corrected.now().isoformat(timespec="seconds"),
            lease,
        )
    return corrected


def _describe(offset: float, place: str, the: str) -> str:
    ahead = f"{abs(offset):,.0f} s {'ahead of' if offset < 0 else 'behind'}"
    host = socket.gethostname()
    return f"{the} clock of host {host!r} is {ahead} that of the staging folder {place}"
