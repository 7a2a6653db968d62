"""Assigns a batcher's messages to batches.

The messages stream in order through :class:`airflow_broadway.core.stages.batcher.BatcherStage`,
whose clock is the time at which each was received.  So the same messages yield the same batches
and the same ``batch_id``s, on any machine and at any time.

Memory holds the ids of one table, and a running hash and counts per open batch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from airflow_broadway.core.formats.plan import PlannedBatch
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.encoding import load_key
from airflow_broadway.core.stages.batcher import BatcherStage, BatchHash, ItemBatch, KeyMerger
from airflow_broadway.core.stages.callbacks import log_failure, status_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.batch_reader import messages_of
from airflow_broadway.staging.merge_generations import AT, SOURCE


class _Row(NamedTuple):
    """The fields of a message for batching: an item of the batcher.

    :param source: The index of its generation.
    :param place: The index of its row in the table.
    """

    batch_key: str
    batch_mode: BatchMode
    size: int
    partition: int | None
    message_id: str
    redelivered: bool
    source: int
    place: int


class _Pending:
    """An open batch: a running hash and counts, without its messages.

    :param number: The value of its rows in the column ``batch``.
    """

    __slots__ = ("_batching", "bytes", "files", "hash", "ids", "number", "redelivered", "sources")

    def __init__(self, batching: Batching, number: int, key: str) -> None:
        self._batching = batching
        self.number = number
        self.hash: BatchHash | str = batching.hash_of(load_key(json.loads(key)))
        self.ids: list[str] = []
        self.bytes = 0
        self.redelivered = 0
        #: Messages by source.
        self.sources = batching.no_sources[:]
        #: One bit per data file that holds any of its rows.
        self.files = 0

    def append(self, row: _Row) -> None:
        ids = self.ids
        batching = self._batching
        if not ids:
            batching.touched.append(self)
        ids.append(row.message_id)
        batching.column[row.place] = self.number
        self.bytes += row.size
        self.redelivered += row.redelivered
        self.sources[row.source] += 1

    def absorb(self) -> None:
        """Adds the collected ids to the hash."""
        if self.ids and isinstance(self.hash, BatchHash):
            self.hash.update_all(self.ids)
        self.ids = []

    def close(self) -> str:
        """Returns the batch's id."""
        self.absorb()
        if isinstance(self.hash, BatchHash):
            self.hash = self.hash.hexdigest()
        return self.hash


class Batching:
    """Assigns rows to batches, table by table.

    :param generations: The sources of the tables, by index.
    """

    def __init__(self, pipeline: Pipeline, batcher: str, generations: Sequence[str]) -> None:
        self._pipeline = pipeline
        self._batcher = batcher
        self._options: Batcher = pipeline.batchers[batcher]
        self._generations = generations
        self.no_sources = [0] * len(generations)
        #: The batch of each row of the current table, and the batches with rows of it.
        self.column: list[int] = []
        self.touched: list[_Pending] = []
        #: The messages of that table, if a function of them decides when a batch is full.
        self._messages: list[Message] = []
        self._pending: dict[int, _Pending] = {}
        self._opened = 0
        self._stage = self._make_stage()
        self._merger: KeyMerger | None = None
        if self._options.merge_keys:
            self._merger = KeyMerger(self._options.batch_size, self._options.batch_bytes)
        #: Batches for the next call of :meth:`closed`: per planned batch its parts, several if keys
        #: are merged.
        self._closed: list[list[ItemBatch]] = []
        self._batch_ids: set[bytes] = set()

    def _make_stage(self) -> BatcherStage:
        options = dataclasses.replace(self._options, batch_timeout=self._options.staged_timeout)
        return BatcherStage(
            self._batcher,
            options,
            make=self._open,
            message_of=lambda row: self._messages[row.place],
        )

    def _open(self, key: str, partition: int | None) -> _Pending:
        pending = _Pending(self, self._opened, key)
        self._pending[self._opened] = pending
        self._opened += 1
        return pending

    def hash_of(self, key: Any) -> BatchHash:
        """Creates the running hash of a new batch."""
        return BatchHash(self._pipeline.name, self._batcher, key)

    # -- rows ----------------------------------------------------------------------------------

    def add(self, table: pa.Table) -> list[int]:
        """Batches the rows of the next table; returns the batch number of each row."""
        self.column = [-1] * table.num_rows
        rows = _rows(table)
        if isinstance(self._options.batch_size, tuple):
            self._messages = messages_of(
                table, self._options.schema, self._batcher, python=self._options.engine == "python"
            )
        stage, timed = self._stage, self._options.staged_timeout is not None
        if not timed and not pc.any(table["flush"]).as_py():
            # Without flushes and timeouts chunk boundaries do not matter.
            self._close(stage.add(rows, 0.0))
        else:
            for start, stop, now in _iter_chunks(table):
                if timed:
                    self._close(stage.due(now))
                self._close(stage.add(rows[start:stop], now))
        for pending in self.touched:
            pending.absorb()
        self.touched.clear()
        return self.column

    def finish(self) -> None:
        """Closes all open batches."""
        self._close(self._stage.flush())
        if self._merger is not None:
            self._closed += self._merger.flush()

    def _close(self, closed: list[ItemBatch]) -> None:
        if not closed:
            return
        for batch in closed:
            batch.pending.close()
            if batch.error is not None:
                log_failure("batch_size", self._pipeline, batch.error, batch.size)
        if self._merger is None:
            self._closed += [[batch] for batch in closed]
        else:
            for batch in closed:
                batch.bytes = batch.pending.bytes
            self._closed += self._merger.add(closed)

    # -- batches -------------------------------------------------------------------------------

    def note_file(self, file: int, batches: Iterable[int]) -> None:
        """Records that the data file with this index holds rows of these batches."""
        for number in batches:
            self._pending[number].files |= 1 << file

    def closed(self) -> Iterator[PlannedBatch]:
        """Yields the batches closed since the last call; all their rows are in data files."""
        for parts in self._closed:
            yield self._planned(parts)
        self._closed.clear()

    def _planned(self, parts: list[ItemBatch]) -> PlannedBatch:
        pendings: list[_Pending] = [batch.pending for batch in parts]
        first = parts[0]
        for pending in pendings:
            del self._pending[pending.number]
        files, sources = 0, self.no_sources[:]
        for pending in pendings:
            files |= pending.files
            sources = [a + b for a, b in zip(sources, pending.sources, strict=True)]
        if self._merger is None:
            batch_id, key, keys = pendings[0].close(), json.loads(first.key), 1
        else:
            # A hash of hashes: the ids of the batches represent the ids of their messages.
            batch_id = self.hash_of(None).update_all(p.close() for p in pendings).hexdigest()
            key, keys = None, len({batch.key for batch in parts})
        return PlannedBatch(
            batch_id=self._unique(batch_id),
            rows=_to_ranges(sorted(pending.number for pending in pendings)),
            files=[index for index in range(files.bit_length()) if files >> index & 1],
            batch_key=key,
            keys=keys,
            partition=first.partition,
            size=sum(batch.size for batch in parts),
            bytes=sum(pending.bytes for pending in pendings),
            trigger=max(parts, key=lambda batch: batch.size).trigger.value,
            redelivered=sum(pending.redelivered for pending in pendings),
            sources={
                generation: count
                for generation, count in zip(self._generations, sources, strict=True)
                if count
            },
            error="" if first.error is None else status_of(first.error).text,
        )

    def _unique(self, batch_id: str) -> str:
        """Derives another id for a batch with the same messages as an earlier one of the plan.

        Two generations have the same messages if the lease of the first has lapsed.  With one id
        the outcome of one batch would settle the messages of the other.
        """
        while bytes.fromhex(batch_id) in self._batch_ids:
            batch_id = self.hash_of(None).update_all([batch_id]).hexdigest()
        self._batch_ids.add(bytes.fromhex(batch_id))
        return batch_id


def _rows(table: pa.Table) -> list[_Row]:
    flush = table["flush"]
    count = table.num_rows
    bulk, flushed = BatchMode.BULK, BatchMode.FLUSH
    modes: Any = [bulk] * count
    if pc.any(flush).as_py():
        modes = [flushed if flushes else bulk for flushes in flush.to_pylist()]
    keys = table["batch_key"].to_pylist()
    names = ("size", "partition", "message_id", "redelivered", SOURCE)
    columns = (table[name].to_pylist() for name in names)
    return list(map(_Row._make, zip(keys, modes, *columns, range(count), strict=True)))


def _iter_chunks(table: pa.Table) -> Iterator[tuple[int, int, float]]:
    """Yields start, end and time of receipt of each chunk of the table."""
    span = 1 << 40  # more than the chunks of any generation
    both: Any = pc.add(pc.multiply(table[SOURCE].cast(pa.int64()), span), table["chunk"])
    start = 0
    for stop in pc.run_end_encode(both.combine_chunks()).run_ends.to_pylist():
        yield start, stop, table[AT][start].as_py() / 1e6
        start = stop


def _to_ranges(numbers: list[int]) -> list[list[int]]:
    """Converts sorted numbers to inclusive ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
