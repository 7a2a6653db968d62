"""The batcher: a pure state machine from items and timestamps to closed batches.

It uses only the ``batch_key``, ``batch_mode`` and ``size`` of an item, and fills the
result of ``make(key, partition)``: a list in the local runner, a counter with a running hash when
staged rows are planned.  Equal items at equal timestamps form equal batches.

It follows Broadway's rules exactly: items are cut into chunks of ``max_demand - max_demand // 2``;
a chunk is processed in runs of one (key, partition); a batch is closed when it is full (by count,
by bytes or by the custom splitter), at the end of a run that contains a ``flush`` item, on its
timeout, and at the end of input.  ``docs/semantics.md`` has the details.

One rule differs: in Broadway a custom splitter that raises terminates its batcher.  Here only the
item on which it raises fails, in a batch that has an ``error``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.batch_info import Trigger
from airflow_broadway.core.model.message import BatchMode
from airflow_broadway.core.model.pipeline_options import Batcher, Processors
from airflow_broadway.core.schema.encoding import dump_key
from airflow_broadway.core.stages.callbacks import protected, status_of

_FLUSH: Final = BatchMode.FLUSH


@dataclass(slots=True)
class ItemBatch:
    """A batch of items: open in its batcher, complete once that has returned it.

    :param pending: The filled result of ``make``.
    :param trigger: Why it was closed.
    :param size: The number of items; at least 1.
    :param bytes: Their total size; 0 if the batcher has no ``batch_bytes``.
    :param error: The custom splitter's exception on each of its items; ``None`` if none.
    :param deadline: The time of its timeout.
    :param acc: The custom splitter's accumulator.
    """

    pending: Any
    key: Any
    partition: int | None
    trigger: Trigger = Trigger.FLUSH
    size: int = 0
    bytes: int = 0
    error: BaseException | None = None
    deadline: float = math.inf
    acc: Any = None


class BatcherStage:
    """The batcher ``name``: takes items, returns the batches that they close.

    An item is a message, or a row that represents one: it has a ``batch_key``, a ``batch_mode`` and
    a ``size``; and a ``partition``, as computed by :func:`partitioner`, if the batcher has
    ``partition_by``.  Batches are then per (key, partition).

    :param make: ``make(key, partition)`` creates a batch, to which ``append`` adds an item.  If it
        is a list, runs of items are added together.
    :param message_of: Returns the message of an item, for the custom splitter.
    """

    def __init__(
        self,
        name: str,
        options: Batcher,
        *,
        make: Callable[[Any, int | None], Any] = lambda key, partition: [],
        message_of: Callable[[Any], Any] = lambda item: item,
    ) -> None:
        self.name = name
        #: The number of items per chunk; more are cut into several chunks.
        self.chunk_size: int = options.max_demand - options.max_demand // 2
        self._make = make
        self._message_of = message_of
        self._partitioned = options.partition_by is not None
        self._timeout: float = math.inf if options.batch_timeout is None else options.batch_timeout
        self._limit: int | None = options.batch_bytes
        self._size: int = 0
        self._initial: Any = None
        self._split: Callable[[Any, Any], Any] | None = None
        if isinstance(options.batch_size, tuple):
            self._initial, self._split = options.batch_size
        else:
            self._size = options.batch_size
        # In order of opening, and so of deadlines: a reopened key moves to the end.
        self._open: dict[Any, ItemBatch] = {}
        #: Items on which the splitter raised, by key, partition and the text of the error.
        self._failed: dict[Any, ItemBatch] = {}

    def add(self, items: Sequence[Any], now: float) -> list[ItemBatch]:
        """Adds ``items`` in order; returns the batches that they closed, in order of closing.

        :param now: The current time, in seconds of the clock that is used for :meth:`due`.
        """
        closed: list[ItemBatch] = []
        for start in range(0, len(items), self.chunk_size):
            self._add_chunk(items[start : start + self.chunk_size], now, closed)
        return closed

    def due(self, now: float) -> list[ItemBatch]:
        """Closes batches that have been open for ``batch_timeout``, in order of their deadlines."""
        closed: list[ItemBatch] = []
        due = takewhile(lambda batch: batch.deadline <= now, self._open.values())
        for batch in list(due):
            self._close(batch, Trigger.TIMEOUT, closed)
        return closed

    def next_due(self) -> float | None:
        """Returns the time of the next timeout.

        ``None`` if no batch is open, or batches have no timeout.
        """
        first = next(iter(self._open.values()), None)
        return None if first is None or first.deadline == math.inf else first.deadline

    def flush(self) -> list[ItemBatch]:
        """Closes every open batch, in order of opening, at the end of input."""
        closed: list[ItemBatch] = []
        for batch in list(self._open.values()):
            self._close(batch, Trigger.FLUSH, closed)
        closed += self._failed.values()
        self._failed.clear()
        return closed

    # -- inside --------------------------------------------------------------------------------

    def _add_chunk(self, items: Sequence[Any], now: float, closed: list[ItemBatch]) -> None:
        start, count = 0, len(items)
        partitioned = self._partitioned
        simple = self._split is None and self._limit is None
        add = self._add_run if simple else self._add_one_by_one
        while start < count:
            item = items[start]
            key, number = item.batch_key, item.partition if partitioned else None
            identity = (key, number) if partitioned else key
            stop = start + 1
            while (
                stop < count
                and items[stop].batch_key == key
                and (not partitioned or items[stop].partition == number)
            ):
                stop += 1
            add(items[start:stop], identity, key, number, now, closed)
            start = stop

    def _add_run(
        self,
        run: Sequence[Any],
        identity: Any,
        key: Any,
        partition: int | None,
        now: float,
        closed: list[ItemBatch],
    ) -> None:
        """Adds a run to batches that are closed by count only."""
        while run:
            batch = self._open.get(identity)
            if batch is None:
                batch = self._begin(identity, key, partition, now)
            room = self._size - batch.size
            taken = run if len(run) <= room else run[:room]
            pending = batch.pending
            if type(pending) is list:
                pending += taken
            else:
                append = pending.append
                for item in taken:
                    append(item)
            batch.size += len(taken)
            if len(taken) == room:
                self._close(batch, Trigger.SIZE, closed)
            else:
                for item in taken:
                    if item.batch_mode == _FLUSH:
                        self._close(batch, Trigger.FLUSH, closed)
                        break
            run = run[room:]

    def _add_one_by_one(
        self,
        run: Sequence[Any],
        identity: Any,
        key: Any,
        partition: int | None,
        now: float,
        closed: list[ItemBatch],
    ) -> None:
        """Adds a run to batches that are also closed by bytes or by a custom splitter."""
        limit, split = self._limit, self._split
        batch = self._open.get(identity)
        flush = False
        for item in run:
            size = item.size
            if batch is not None and limit is not None and batch.bytes + size > limit:
                self._close(batch, Trigger.BYTES, closed)
                batch, flush = None, False
            emits, acc = False, self._initial if batch is None else batch.acc
            if split is not None:
                try:
                    emits, acc = self._call_splitter(split, item, acc)
                except protected() as error:
                    self._fail(item, identity, key, partition, error)
                    continue
            if batch is None:
                batch = self._begin(identity, key, partition, now)
            batch.pending.append(item)
            batch.size += 1
            batch.bytes += size
            batch.acc = acc
            if item.batch_mode == _FLUSH:
                flush = True
            if emits or batch.size == self._size:
                trigger = Trigger.SIZE
            elif limit is not None and batch.bytes >= limit:
                trigger = Trigger.BYTES  # full: only empty items would still fit
            else:
                continue
            self._close(batch, trigger, closed)
            batch, flush = None, False
        if flush and batch is not None:
            self._close(batch, Trigger.FLUSH, closed)

    def _fail(
        self, item: Any, identity: Any, key: Any, partition: int | None, error: BaseException
    ) -> None:
        """Adds an item on which the splitter raised to the batch of equal failures."""
        name = identity, status_of(error).text
        batch = self._failed.get(name)
        if batch is None:
            batch = self._failed[name] = ItemBatch(self._make(key, partition), key, partition)
            batch.error = error
        batch.pending.append(item)
        batch.size += 1
        batch.bytes += item.size

    def _call_splitter(
        self, split: Callable[[Any, Any], Any], item: Any, acc: Any
    ) -> tuple[bool, Any]:
        """Returns whether the splitter closes the batch with this item, and its accumulator."""
        result = split(self._message_of(item), acc)
        if isinstance(result, tuple) and len(result) == 2 and result[0] in ("emit", "cont"):
            # The accumulator of "emit" is ignored: as in Broadway's code (and unlike its
            # documentation) the next batch starts from the initial value.
            return result[0] == "emit", result[1]
        raise PipelineError(
            f"the splitter of batcher {self.name!r} must return ('cont', acc) or ('emit', acc),"
            f" got: {result!r:.200}"
        )

    def _begin(self, identity: Any, key: Any, partition: int | None, now: float) -> ItemBatch:
        batch = ItemBatch(self._make(key, partition), key, partition)
        batch.deadline, batch.acc = now + self._timeout, self._initial
        self._open[identity] = batch
        return batch

    def _close(self, batch: ItemBatch, trigger: Trigger, closed: list[ItemBatch]) -> None:
        key, partition = batch.key, batch.partition
        del self._open[(key, partition) if self._partitioned else key]
        batch.trigger = trigger
        closed.append(batch)


def partitioner(options: Batcher | Processors) -> Callable[[Any], int] | None:
    """Returns a function from message to partition: ``partition_by`` modulo ``concurrency``;
    ``None`` without ``partition_by``.

    :raises PipelineError: When called, if ``partition_by`` does not return an integer of at least
        0.
    """
    function, concurrency = options.partition_by, options.concurrency
    if function is None:
        return None

    def partition(message: Any) -> int:
        value = function(message)
        if type(value) is not int or value < 0:
            raise PipelineError(
                f"partition_by must return an integer of at least 0, got: {value!r:.200}"
            )
        return value % concurrency

    return partition


class KeyMerger:
    """Packs whole closed batches of many keys into calls of up to ``batch_size`` items.

    Preserves order per partition: a batch never overtakes an earlier one.
    """

    def __init__(self, batch_size: int, batch_bytes: int | None = None) -> None:
        self._size = batch_size
        self._bytes = batch_bytes
        #: Partition → its open call, with its size and bytes.
        self._calls: dict[int | None, tuple[list[ItemBatch], int, int]] = {}

    def add(self, closed: Iterable[ItemBatch]) -> list[list[ItemBatch]]:
        """Adds closed batches; returns the calls that they filled."""
        full: list[list[ItemBatch]] = []
        for batch in closed:
            call, size, total = self._calls.get(batch.partition, ([], 0, 0))
            size += batch.size
            total += batch.bytes
            if call and (size > self._size or (self._bytes is not None and total > self._bytes)):
                full.append(call)
                self._calls.pop(batch.partition)
                call, size, total = [], batch.size, batch.bytes
            call.append(batch)
            if size >= self._size or (self._bytes is not None and total >= self._bytes):
                full.append(call)
                self._calls.pop(batch.partition, None)
            else:
                self._calls[batch.partition] = (call, size, total)
        return full

    def flush(self) -> list[list[ItemBatch]]:
        """Returns the calls that are not full, in order of opening."""
        rest = [call for call, _, _ in self._calls.values()]
        self._calls.clear()
        return rest


class BatchHash:
    """The ``batch_id``, computed incrementally: a hash of pipeline, batcher, key and message ids.

    Every part is prefixed with its length, so that distinct lists of parts have distinct hashes.
    """

    __slots__ = ("_hash",)

    def __init__(self, pipeline: str, batcher: str, key: Any) -> None:
        self._hash = hashlib.sha256()
        self.update_all((pipeline, batcher, _key_text(key)))

    def update_all(self, message_ids: Iterable[str]) -> BatchHash:
        """Adds several message ids, in order; returns itself."""
        encoded = [message_id.encode("utf-8", "surrogatepass") for message_id in message_ids]
        self._hash.update(b"".join([b"%d:%b" % (len(part), part) for part in encoded]))
        return self

    def hexdigest(self) -> str:
        """Returns 32 hexadecimal digits."""
        return self._hash.hexdigest()[:32]


def _key_text(key: Any) -> str:
    """Returns a key as text that is equal in every process."""
    try:
        return json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        return dump_key(key)
