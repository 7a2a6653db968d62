"""Python's cyclic garbage collector while a task handles messages.

Messages are freed by their reference counts, yet the collector walks over them: after each 700 new
objects over those, and again and again over everything that the process has loaded, Airflow
included.  That took a third of a process stage's time.

A message is half a dozen objects, and a receive brings thousands, which all go again.  So it
looks after more than those; and after so many bytes of messages, too (:func:`look_after`), for what
callbacks leave behind in rings may hold them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: New objects after which the young ones are looked at.
_THRESHOLD: Final = 50_000
#: Bytes of messages after which they are.
_BYTES: Final = 64 * 1024 * 1024


@contextmanager
def rare_collections() -> Iterator[None]:
    """Have it look less often, and at nothing that is there already; afterwards as before.

    A process that set it up otherwise keeps that: switched off, a larger threshold, objects frozen.
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


def look_after(handled: int, looked: int) -> int:
    """Have it look at the young objects, if much was handled since it last did.

    A process that set up by itself how often it looks keeps that.

    :param handled: Bytes of the messages that were handled so far.
    :param looked: What this returned the last time; 0 at first.
    """
    if handled - looked < _BYTES:
        return looked
    if gc.isenabled() and gc.get_threshold()[0] == _THRESHOLD:
        gc.collect(1)
    return handled
