"""Decides which batch of a plan may run next.

Batches that share a partition, or a key, run one after another in the order of the plan; all others
may run concurrently.  The plan does not list the keys of merged batches, so without
``partition_by`` merged batches run one after another, too.  A plan is read ahead only as far as
needed: it may have very many batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from airflow_broadway.core.formats.plan import PlannedBatch

#: Batches read ahead in search of a runnable one.
WINDOW = 1000


def chains(batch: PlannedBatch, *, merged: bool) -> frozenset[str]:
    """Returns the names of the orders that a batch belongs to."""
    names = set()
    if batch.partition is not None:
        names.add(f"partition {batch.partition}")
    if not merged:
        names.add(f"key {json.dumps(batch.batch_key, sort_keys=True)}")
    elif batch.partition is None:
        names.add("merged")
    return frozenset(names)


class BatchOrder:
    """Yields the batches of one plan in a valid order; the caller locks.

    :param merged: Whether the batcher merges keys.
    """

    def __init__(self, batches: Iterator[PlannedBatch], *, merged: bool) -> None:
        self._batches = batches
        self._merged = merged
        self._waiting: list[tuple[PlannedBatch, frozenset[str]]] = []
        self._running: dict[str, frozenset[str]] = {}
        self._read_all = False

    def take(self) -> PlannedBatch | None:
        """Returns the next batch that may run now.

        ``None`` if none is left, or each remaining one must wait for a running one.
        """
        busy: set[str] = set().union(*self._running.values())
        index = 0
        while self._read_ahead(index):
            batch, own = self._waiting[index]
            if busy.isdisjoint(own):
                del self._waiting[index]
                self._running[batch.batch_id] = own
                return batch
            # It waits, and so do all behind it that share an order with it.
            busy |= own
            index += 1
        return None

    def done(self, batch: PlannedBatch) -> None:
        """Marks a taken batch as ended, whatever its outcome."""
        del self._running[batch.batch_id]

    @property
    def finished(self) -> bool:
        """Whether no batch remains, now or later, and none is running."""
        return not self._read_ahead(0) and not self._running

    def _read_ahead(self, index: int) -> bool:
        while len(self._waiting) <= index and not self._read_all and index < WINDOW:
            batch = next(self._batches, None)
            if batch is None:
                self._read_all = True
            else:
                self._waiting.append((batch, chains(batch, merged=self._merged)))
        return index < len(self._waiting)
