"""Tunes Python's cyclic garbage collector while a task handles messages.

Reference counts free the messages, yet the collector scans them after every 700 new container
objects, and repeatedly scans all loaded modules, Airflow's included.  That took a third of a
process stage's time.

A message is about six objects, and a receive allocates thousands that are freed together.  So the
threshold is higher, and existing objects are frozen.  Cycles created by callbacks may keep messages
or tables alive, so the young generations are also collected after a number of message bytes, and
after batches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: New container objects after which the young generation is collected.
_THRESHOLD: Final = 50_000
#: Message bytes after which the young generations are collected.
_BYTES: Final = 64 * 1024 * 1024
#: Collections after batches take at most this share of the time.
_SHARE: Final = 0.05

#: When the next collection after a batch may start, on the monotonic clock.
_not_before = 0.0


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raises the collection threshold and freezes existing objects; restores both on exit.

    Settings that the process changed itself are kept: a disabled collector, a larger threshold,
    frozen objects.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if 0 < before[0] < _THRESHOLD:
        gc.set_threshold(_THRESHOLD, *before[1:])
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        gc.set_threshold(*before)


def look_after(handled: int, collected: int) -> int:
    """Collects the young generations once enough bytes were handled since the last collection.

    :param handled: Bytes of the messages that were handled so far.
    :param collected: The previous return value; 0 initially.
    """
    if handled - collected < _BYTES:
        return collected
    _collect_young()
    return handled


def collect_after_batch() -> None:
    """Collects the young generations during :func:`rare_collections`.

    A collection scans the messages of batches that are alive: some milliseconds for thousands.  So
    it is left out while collections have taken more than :data:`_SHARE` of the time.
    """
    global _not_before  # noqa: PLW0603 - the collector is the process's, too
    began = time.monotonic()
    if began >= _not_before:
        _collect_young()
        ended = time.monotonic()
        _not_before = ended + (ended - began) / _SHARE


def _collect_young() -> None:
    """Collects the young generations, unless the process changed the threshold itself."""
    if gc.isenabled() and gc.get_threshold()[0] == _THRESHOLD:
        gc.collect(1)
