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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.batch_info import Trigger
from airflow_broadway.core.model.message import BatchMode
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.schema.encoding import dump_key
from airflow_broadway.core.stages.callbacks import protected, status_of

_FLUSH: Final = BatchMode.FLUSH


class Item(Protocol):
    """A message, or a row that represents one."""

    @property
    def batch_key(self) -> Any: ...
    @property
    def batch_mode(self) -> Any: ...
    @property
    def size(self) -> int: ...


class Pending(Protocol):
    """A batch being filled.  If it is a list, runs of items are added together."""

    def append(self, item: Any, /) -> Any:
        """Adds one item."""
        ...


class Closed(NamedTuple):
    """A complete batch.

    :param pending: The filled result of ``make``.
    :param size: The number of items; at least 1.
    :param bytes: Their total size; 0 if the batcher has no ``batch_bytes``.
    :param error: The custom splitter's exception on each of its items; ``None`` if none.
    """

    pending: Any
    key: Any
    partition: int | None
    trigger: Trigger
    size: int
    bytes: int = 0
    error: BaseException | None = None


class _Open:
    """An open batch and its state in the batcher."""

    __slots__ = ("acc", "bytes", "closed", "count", "deadline", "error", "key", "partition", "to")

    def __init__(self, to: Any, key: Any, partition: int | None, acc: Any, deadline: float) -> None:
        self.to = to
        self.error: BaseException | None = None
        self.key = key
        self.partition = partition
        self.acc = acc
        self.deadline = deadline
        self.count = 0
        self.bytes = 0
        self.closed = False


class BatcherStage:
    """The batcher ``name``: takes items, returns the batches that they close.

    :param make: ``make(key, partition)`` creates a batch.
    :param partition: Item → partition of the batch, as made by :func:`partitioner`; batches are
        then per (key, partition).
    """

    def __init__(
        self,
        name: str,
        options: Batcher,
        *,
        make: Callable[[Any, int | None], Pending] = lambda key, partition: [],
        partition: Callable[[Any], int] | None = None,
    ) -> None:
        self.name = name
        #: The number of items per chunk; more are cut into several chunks.
        self.chunk_size: int = options.max_demand - options.max_demand // 2
        self._make = make
        self._partition = partition
        self._timeout: float | None = options.batch_timeout
        self._limit: int | None = options.batch_bytes
        self._size: int = 0
        self._initial: Any = None
        self._split: Callable[[Any, Any], Any] | None = None
        if isinstance(options.batch_size, tuple):
            self._initial, self._split = options.batch_size
        else:
            self._size = options.batch_size
        # In order of opening: dicts preserve it, and a reopened key moves to the end.
        self._open: dict[Any, _Open] = {}
        # The same order, for timeouts; batches closed otherwise are skipped when they come up.
        self._timers: deque[_Open] = deque()
        #: Items on which the splitter raised, by key, partition and the text of the error.
        self._failed: dict[Any, _Open] = {}

    @property
    def pending(self) -> int:
        """The number of open batches."""
        return len(self._open) + len(self._failed)

    def add(self, items: Sequence[Item], now: float) -> list[Closed]:
        """Adds ``items`` in order; returns the batches that they closed, in order of closing.

        :param now: The current time, in seconds of the clock that is used for :meth:`due`.
        """
        closed: list[Closed] = []
        step = self.chunk_size
        if len(items) <= step:
            self._add_chunk(items, now, closed)
        else:
            for start in range(0, len(items), step):
                self._add_chunk(items[start : start + step], now, closed)
        return closed

    def due(self, now: float) -> list[Closed]:
        """Closes batches that have been open for ``batch_timeout``, in order of their deadlines."""
        closed: list[Closed] = []
        timers = self._timers
        while timers and (timers[0].closed or timers[0].deadline <= now):
            batch = timers.popleft()
            if not batch.closed:
                self._close(batch, Trigger.TIMEOUT, closed)
        return closed

    def next_due(self) -> float | None:
        """Returns the time of the next timeout.

        ``None`` if no batch is open, or batches have no timeout.
        """
        timers = self._timers
        while timers and timers[0].closed:
            timers.popleft()
        return timers[0].deadline if timers else None

    def flush(self) -> list[Closed]:
        """Closes every open batch, in order of opening, at the end of input."""
        closed: list[Closed] = []
        for batch in list(self._open.values()):
            self._close(batch, Trigger.FLUSH, closed)
        self._timers.clear()
        closed += [_to_closed(batch, Trigger.FLUSH) for batch in self._failed.values()]
        self._failed.clear()
        return closed

    # -- inside --------------------------------------------------------------------------------

    def _add_chunk(self, items: Sequence[Item], now: float, closed: list[Closed]) -> None:
        start, count = 0, len(items)
        partition = self._partition
        simple = self._split is None and self._limit is None
        while start < count:
            item = items[start]
            key = item.batch_key
            stop = start + 1
            if partition is None:
                number = None
                identity = key
                while stop < count and items[stop].batch_key == key:
                    stop += 1
            else:
                number = partition(item)
                identity = (key, number)
                while (
                    stop < count
                    and items[stop].batch_key == key
                    and partition(items[stop]) == number
                ):
                    stop += 1
            if simple:
                self._add_run(items[start:stop], identity, key, number, now, closed)
            else:
                self._add_one_by_one(items[start:stop], identity, key, number, now, closed)
            start = stop

    def _add_run(
        self,
        run: Sequence[Item],
        identity: Any,
        key: Any,
        partition: int | None,
        now: float,
        closed: list[Closed],
    ) -> None:
        """Adds a run to batches that are closed by count only."""
        while run:
            batch = self._open.get(identity)
            if batch is None:
                batch = self._begin(identity, key, partition, now)
            room = self._size - batch.count
            taken = run if len(run) <= room else run[:room]
            to = batch.to
            if len(taken) == 1:
                to.append(taken[0])
            elif type(to) is list:
                to.extend(taken)
            else:
                append = to.append
                for item in taken:
                    append(item)
            batch.count += len(taken)
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
        run: Sequence[Item],
        identity: Any,
        key: Any,
        partition: int | None,
        now: float,
        closed: list[Closed],
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
            batch.to.append(item)
            batch.count += 1
            batch.bytes += size
            batch.acc = acc
            if item.batch_mode == _FLUSH:
                flush = True
            if emits or batch.count == self._size:
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
        self, item: Item, identity: Any, key: Any, partition: int | None, error: BaseException
    ) -> None:
        """Adds an item on which the splitter raised to the batch of equal failures."""
        name = identity, status_of(error).text
        batch = self._failed.get(name)
        if batch is None:
            batch = self._failed[name] = _Open(self._make(key, partition), key, partition, None, 0)
            batch.error = error
        batch.to.append(item)
        batch.count += 1
        batch.bytes += item.size

    def _call_splitter(
        self, split: Callable[[Any, Any], Any], item: Item, acc: Any
    ) -> tuple[bool, Any]:
        """Returns whether the splitter closes the batch with this item, and its accumulator."""
        result = split(item, acc)
        if isinstance(result, tuple) and len(result) == 2 and result[0] in ("emit", "cont"):
            # The accumulator of "emit" is ignored: as in Broadway's code (and unlike its
            # documentation) the next batch starts from the initial value.
            return result[0] == "emit", result[1]
        raise PipelineError(
            f"the splitter of batcher {self.name!r} must return ('cont', acc) or ('emit', acc),"
            f" got: {result!r:.200}"
        )

    def _begin(self, identity: Any, key: Any, partition: int | None, now: float) -> _Open:
        timeout = self._timeout
        to = self._make(key, partition)
        batch = _Open(to, key, partition, self._initial, 0.0 if timeout is None else now + timeout)
        self._open[identity] = batch
        if timeout is not None:
            self._timers.append(batch)
        return batch

    def _close(self, batch: _Open, trigger: Trigger, closed: list[Closed]) -> None:
        key, partition = batch.key, batch.partition
        del self._open[key if self._partition is None else (key, partition)]
        batch.closed = True
        closed.append(_to_closed(batch, trigger))
        batch.to = None  # a timer may reference the batch for a while; release its items


def _to_closed(batch: _Open, trigger: Trigger) -> Closed:
    return Closed(
        batch.to, batch.key, batch.partition, trigger, batch.count, batch.bytes, batch.error
    )


def partitioner(options: Batcher) -> Callable[[Any], int] | None:
    """Returns a function from message to partition: ``partition_by`` modulo ``concurrency``.

    :raises PipelineError: When called, if ``partition_by`` does not return an integer of at least
        0.
    """
    return partition_of(options.partition_by, options.concurrency)


def partition_of(function: Any, concurrency: int) -> Callable[[Any], int] | None:
    """Returns ``function`` modulo ``concurrency``, validated; ``None`` without a function."""
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
        self._calls: dict[int | None, tuple[list[Closed], int, int]] = {}

    def add(self, closed: Iterable[Closed]) -> list[list[Closed]]:
        """Adds closed batches; returns the calls that they filled."""
        full: list[list[Closed]] = []
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

    def flush(self) -> list[list[Closed]]:
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
        for part in (pipeline, batcher, _key_text(key)):
            self.update(part)

    def update(self, message_id: str) -> BatchHash:
        """Adds one message id; returns itself."""
        part = message_id.encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:%b" % (len(part), part))
        return self

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
