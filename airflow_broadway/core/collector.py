"""Python's cyclic garbage collector while a task handles messages.

Messages are freed by their reference counts, yet the collector walks over them: after each 700 new
objects over those, and again and again over everything that the process has loaded, Airflow
included.  That took a third of a process stage's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["rare_collections"]

#: New objects after which the young ones are looked at: what callbacks leave behind in rings waits
#: for so many.
_THRESHOLD: Final = 5_000


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
