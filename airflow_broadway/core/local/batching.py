"""A batcher in one process, with its batch processors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.batch_processor import (
    BatchProcessorStage,
    BatchResult,
    CommitRows,
)
from airflow_broadway.core.stages.batcher import BatcherStage, BatchHash, ItemBatch, KeyMerger
from airflow_broadway.core.stages.callbacks import context_of, log_failure, status_of
from airflow_broadway.core.stages.failure_log import log_stuck
from airflow_broadway.core.stages.processor import Ack
from airflow_broadway.core.stages.staged_row import PlacedData, PlacedMessage
from airflow_broadway.core.stages.stop import STOP_CHECK_INTERVAL, Stop
from airflow_broadway.core.stages.worker_pool import WorkerPool


class Batch(NamedTuple):
    """A batch on its way to ``handle_batch``.

    :param keys: Its keys: several with ``merge_keys``.
    :param refused: The status with which it fails unhandled, because the splitter raised.
    """

    batcher: str
    messages: list[Message]
    info: BatchInfo
    keys: tuple[Any, ...]
    refused: Status | None = None


def _make_batch(pipeline: str, batcher: str, call: list[ItemBatch], *, merged: bool) -> Batch:
    """Builds the batch of one ``handle_batch`` call, from one closed batch or several merged."""
    first = call[0]
    parts = [[*map(_message_of, closed.pending)] for closed in call]
    keys = [part[0].batch_key for part in parts]
    ids = [
        BatchHash(pipeline, batcher, key).update_all([m.message_id for m in part]).hexdigest()
        for key, part in zip(keys, parts, strict=True)
    ]
    messages, key, batch_id = parts[0], keys[0], ids[0]
    if merged:
        messages = [message for part in parts for message in part]
        key, batch_id = None, BatchHash(pipeline, batcher, None).update_all(ids).hexdigest()
    info = BatchInfo(
        batcher=batcher,
        batch_key=key,
        partition=first.partition,
        size=len(messages),
        trigger=max(call, key=lambda closed: closed.size).trigger,
        batch_id=batch_id,
        redelivered=sum([message.redelivered for message in messages]),
    )
    refused = None if first.error is None else status_of(first.error)
    return Batch(batcher, messages, info, tuple([closed.key for closed in call]), refused)


def _message_of(item: Message | PlacedMessage) -> Message:
    return item.message if isinstance(item, PlacedMessage) else item


class LocalBatcher:
    """One batcher with its batch processors, in this thread or in threads of their own.

    :param ack: Settles a batch's result.
    :param clock: Measures the batcher's timeout.
    :param stop: Stops the batcher: no further batch is begun.
    :param inline: Whether batches are handled in this thread.
    :param on_batch: Called with each batch before ``handle_batch``.
    :param commit: Returns the commit function of one batch processor.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        name: str,
        *,
        ack: Ack,
        clock: Clock,
        stop: Stop,
        inline: bool,
        on_batch: Callable[[Batch], None],
        commit: Callable[[str], CommitRows],
    ) -> None:
        options = pipeline.batchers[name]
        self.name = name
        #: Trigger → number of batches handled.
        self.triggers: Counter[str] = Counter()
        #: Keys of data that are not in the schema → how often they were dropped.
        self.dropped: Counter[str] = Counter()
        #: Seconds of this thread: in batching, and in ``handle_batch``.
        self.seconds = self.handle_seconds = 0.0
        self._pipeline = pipeline
        self._clock = clock
        self._stop = stop
        self._on_batch = on_batch
        self._stage = BatcherStage(name, options, message_of=_message_of)
        self._merger = (
            KeyMerger(options.batch_size, options.batch_bytes) if options.merge_keys else None
        )
        kind = BatchProcessorStage if options.engine == "python" else _SparkSubstitute
        self._handlers = [
            _make_handler(kind(pipeline, name, index=index, ack=ack, commit=commit(name)))
            for index in range(options.concurrency)
        ]
        self._turns = cycle(range(options.concurrency))
        self._pool: WorkerPool[Batch, BatchResult] | None = None
        if not inline:
            self._pool = WorkerPool(
                self._handlers, name=f"{pipeline.name}-{name}", ordered=False, waiting=1
            )

    def next_due(self) -> float | None:
        """Returns the time of the next timeout; ``None`` if none is running."""
        return self._stage.next_due()

    def add(self, messages: Sequence[Message]) -> None:
        """Adds the processors' messages, and delivers the batches that they fill."""
        started = time.monotonic()
        self._deliver_due()  # a batch after its timeout takes no further message
        now = self._clock.monotonic()
        items = [self._to_item(m) if type(m.data) is PlacedData else m for m in messages]
        if telemetry.observed("batcher"):
            closed: list[ItemBatch] = []
            step = self._stage.chunk_size
            for start in range(0, len(items), step):
                closed += self._add_with_events(items[start : start + step], now)
        else:
            closed = self._stage.add(items, now)
        self.seconds += time.monotonic() - started
        if closed:
            self._deliver(closed)

    def tick(self) -> None:
        """Delivers the batches whose timeout is over, and counts those handled."""
        self._deliver_due()
        if self._pool is not None:
            self._count(self._pool.take())

    def flush(self) -> None:
        """Delivers all pending batches."""
        self._deliver(self._stage.flush(), flush=True)

    def wait(self) -> None:
        """Waits until delivered batches are handled, or the run's time is over."""
        pool = self._pool
        while pool is not None and pool.under_way and not self._stop.late():
            pool.wait(STOP_CHECK_INTERVAL)
            self._count(pool.take())

    def close(self) -> None:
        """Ends the threads, without waiting for what they are handling."""
        if self._pool is not None:
            done, batches = self._pool.left()
            self._count(done)
            log_stuck(f"batcher {self.name!r}", [batch.messages for batch in batches])
            self._pool.close()

    # -- internals -----------------------------------------------------------------------------

    def _to_item(self, message: Message) -> Message | PlacedMessage:
        """Returns the batcher's item for a message whose data is :class:`PlacedData`."""
        placed: PlacedData = message.data
        if placed.dropped:
            self.dropped.update(placed.dropped)
        message = message.put_data(placed.data)
        if placed.partition is None and type(placed.identity) is str:
            return message
        return PlacedMessage(message, placed.identity, placed.partition)

    def _add_with_events(self, chunk: list[Message | PlacedMessage], now: float) -> list[ItemBatch]:
        metadata = {
            "topology_name": self._pipeline.name,
            "name": f"{self._pipeline.name}.Broadway.Batcher_{self.name}",
            "batcher_key": self.name,
            "context": context_of(self._pipeline),
        }
        span = telemetry.Span("batcher", {**metadata, "messages": [*map(_message_of, chunk)]})
        try:
            closed = self._stage.add(chunk, now)
        except BaseException as error:
            span.exception("error", error, "")
            raise
        span.stop(metadata)
        return closed

    def _deliver_due(self) -> None:
        due = self._stage.due(self._clock.monotonic())
        if due:
            self._deliver(due, flush=True)

    def _deliver(self, closed: list[ItemBatch], *, flush: bool = False) -> None:
        """Handles closed batches; on a stop, remaining ones are not begun.

        :param flush: Whether merged batches do not wait for others.
        """
        calls = [[batch] for batch in closed]
        if self._merger is not None:
            calls = [*self._merger.add(closed), *(self._merger.flush() if flush else ())]
        for call in calls:
            if self._stop.late():
                return
            merged = self._merger is not None
            batch = _make_batch(self._pipeline.name, self.name, call, merged=merged)
            if call[0].error is not None:
                log_failure("batch_size", self._pipeline, call[0].error, batch.messages)
            else:
                self._on_batch(batch)
            lane = batch.info.partition
            if self._pool is None:
                started = time.monotonic()
                result = self._handlers[next(self._turns) if lane is None else lane](batch)
                self.handle_seconds += time.monotonic() - started
                self._count([(batch, result)])
                continue
            while not self._pool.put(
                batch, lane, batch.keys if lane is None else (), STOP_CHECK_INTERVAL
            ):
                if self._stop.late():
                    return
                self._count(self._pool.take())
            self._count(self._pool.take())

    def _count(self, results: list[tuple[Batch, BatchResult]]) -> None:
        self.triggers.update(batch.info.trigger.value for batch, _ in results)


class _SparkSubstitute(BatchProcessorStage):
    """A batch processor whose batches all succeed, in place of Spark."""

    def _call(self, messages: list[Message], info: BatchInfo, context: Any) -> list[Message]:
        return messages


def _make_handler(processor: BatchProcessorStage) -> Callable[[Batch], BatchResult]:
    return lambda batch: processor.handle(batch.messages, batch.info, batch.refused)
