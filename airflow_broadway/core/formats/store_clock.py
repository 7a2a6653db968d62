"""The clock of the staging folder: one clock for the deadlines of leases on all hosts.

A deadline is written by one host and judged by others.  Hosts' clocks differ; the staging folder is
one.  Each task compares its host's clock with the modification time that the folder's file system
gives to a file of the task's own.  Runs on the Spark driver too.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import Files

__all__ = ["StoreClock", "store_clock"]

log = logging.getLogger(__name__)

#: Seconds between two modification times that a file system can tell apart: of object stores, and
#: of disks, whose kernels take the time of the last tick.
_COARSE: Final = 1.0
_FINE: Final = 0.05
#: The share of a lease above which a difference is reported.
_REPORTED: Final = 0.1


class StoreClock:
    """A host's clock, corrected by its difference from the clock of the staging folder.

    :param offset: Seconds to add to the host's time.
    """

    def __init__(self, host: Clock, offset: float) -> None:
        self._host = host
        self._offset = timedelta(seconds=offset)

    def now(self) -> datetime:
        """Return the time of the staging folder: aware, UTC."""
        return self._host.now() + self._offset

    def monotonic(self) -> float:
        """Return seconds from a fixed but arbitrary origin; never goes back."""
        return self._host.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._host.sleep(seconds)


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
    """Return the clock by which to judge deadlines: the host's own, if it is right.

    :param path: A file in the staging folder.
    :param write: Writes it.
    :param lease: Seconds of the lease.
    :param clock: The host's.
    :param place: The folder's address, for people.
    :param report: Whether to log a difference above a tenth of the lease.
    :raises StagingError: If the folder cannot be used, or the clocks differ and the difference is
        not known well enough for the lease.
    """
    before = clock.now()
    write()
    modified = files.modified(path)
    if modified is None:  # a store without modification times
        return clock
    after = clock.now()
    step = _COARSE if modified.is_integer() else _FINE
    least, most = modified - after.timestamp(), modified + step - before.timestamp()
    if least <= 0.0 <= most:
        return clock
    offset, doubt = (least + most) / 2, most - least
    made = StoreClock(clock, offset)
    ahead = f"{abs(offset):,.0f} s {'ahead of' if offset < 0 else 'behind'}"
    differs = f"the clock of host {socket.gethostname()!r} is {ahead} that of the staging folder"
    if doubt > lease / 2:
        raise StagingError(
            f"{differs} {place}, and that is known to {doubt:,.1f} s only, by the time that writing"
            f" a file took: a lease of {lease:g} s cannot be judged; synchronize the host's clock,"
            f" or set the producer's lease to at least {2 * doubt:,.0f} s"
        )
    if report and abs(offset) > _REPORTED * lease:
        log.warning(
            "%s %s: %s here, %s there.  Deadlines of leases (%g s) are judged by the folder's"
            " clock; synchronize the host's.",
            differs.capitalize(),
            place,
            after.isoformat(timespec="seconds"),
            made.now().isoformat(timespec="seconds"),
            lease,
        )
    return made
