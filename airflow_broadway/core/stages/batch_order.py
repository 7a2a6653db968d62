"""Which batch of a plan may run next.

Batches that share a partition, or a key, run one after another and in the order of the plan; all
others may run beside each other.  Merged batches carry keys that the plan does not list, so without
``partition_by`` they run one after another too.  A plan is read only as far ahead as needed: it may
hold very many batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from airflow_broadway.core.formats.plan import PlannedBatch

#: Batches read ahead in search of one that may run.
WINDOW = 1000


def chains(batch: PlannedBatch, *, merged: bool) -> frozenset[str]:
    """The names of the orders that a batch stands in."""
    found = set()
    if batch.partition is not None:
        found.add(f"partition {batch.partition}")
    if not merged:
        found.add(f"key {json.dumps(batch.batch_key, sort_keys=True)}")
    elif batch.partition is None:
        found.add("merged")
    return frozenset(found)


class BatchOrder:
    """Hands out the batches of one plan; the caller locks.

    :param merged: Whether the batcher merges keys.
    """

    def __init__(self, batches: Iterator[PlannedBatch], *, merged: bool) -> None:
        self._batches = batches
        self._merged = merged
        self._waiting: list[tuple[PlannedBatch, frozenset[str]]] = []
        self._running: dict[str, frozenset[str]] = {}
        self._read_all = False

    def take(self) -> PlannedBatch | None:
        """The next batch that may run now.

        ``None`` if none is left, or each that is left must wait for one that runs.
        """
        busy: set[str] = set().union(*self._running.values())
        index = 0
        while self._has(index):
            batch, own = self._waiting[index]
            if busy.isdisjoint(own):
                del self._waiting[index]
                self._running[batch.batch_id] = own
                return batch
            # It waits, and so must all behind it that share an order with it.
            busy |= own
            index += 1
        return None

    def done(self, batch: PlannedBatch) -> None:
        """Say that a batch taken has ended, however it did."""
        del self._running[batch.batch_id]

    @property
    def finished(self) -> bool:
        """Whether no batch is left to take, now or later."""
        return not self._has(0)

    def _has(self, index: int) -> bool:
        while len(self._waiting) <= index and not self._read_all and index < WINDOW:
            batch = next(self._batches, None)
            if batch is None:
                self._read_all = True
            else:
                self._waiting.append((batch, chains(batch, merged=self._merged)))
        return index < len(self._waiting)
