"""The stages of one process put together: processors, batchers, batch processors.

:class:`Engine` is fed with dispatches and drives everything after them; it knows no broker and no
budget.  ``run_local`` and ``BroadwayRunOperator`` feed it from a source, the test kit by hand.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.acknowledger import ack_messages
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.message import BatchInfo, Message
from airflow_broadway.core.model.options import Batcher
from airflow_broadway.core.stages.batch_processor import BatchProcessorStage, BatchResult
from airflow_broadway.core.stages.batcher import (
    BatcherStage,
    BatchHash,
    Closed,
    KeyMerger,
)
from airflow_broadway.core.stages.callbacks import context_of
from airflow_broadway.core.stages.failures import Reasons, tell_stuck
from airflow_broadway.core.stages.processor_pool import Ack, ProcessorPool
from airflow_broadway.core.stages.staged_row import Handing, Item, Placed, item_of
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.worker_pool import WorkerPool

if TYPE_CHECKING:
    from airflow_broadway.core.model.pipeline import Pipeline

__all__ = ["Batch", "Engine", "make_batch"]

_BATCHER: Final = ("batcher.start", "batcher.stop", "batcher.exception")

#: Seconds for which it waits at most without looking whether it is to stop.
_LOOK = 0.5


class Batch(NamedTuple):
    """A batch on its way to ``handle_batch``.

    :param keys: The keys in it: several with ``merge_keys``.
    """

    batcher: str
    messages: list[Message]
    info: BatchInfo
    keys: tuple[Any, ...]


def make_batch(pipeline: str, batcher: str, call: list[Closed], *, merged: bool) -> Batch:
    """The batch of one ``handle_batch`` call: one closed batch, or those that were merged."""
    first = call[0]
    parts = [_messages_of(closed) for closed in call]
    keys = [part[0].batch_key for part in parts]
    ids = [
        BatchHash(pipeline, batcher, key).update_all([each.message_id for each in part]).hexdigest()
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
    return Batch(batcher, messages, info, tuple([closed.key for closed in call]))


def _messages_of(closed: Closed) -> list[Message]:
    pending: list[Any] = closed.pending
    if type(closed.key) is str and closed.partition is None:
        return pending  # else all of them came as items
    return [item.message for item in pending]


class _Batcher:
    """One batcher with its batch processors, in this thread or in threads of their own."""

    def __init__(self, pipeline: Pipeline, name: str, ack: Ack, inline: bool) -> None:
        options = pipeline.batchers[name]
        self.stage = _stage_of(name, options)
        self.merger = (
            KeyMerger(options.batch_size, options.batch_bytes) if options.merge_keys else None
        )
        self.telemetry_name = f"{pipeline.name}.Broadway.Batcher_{name}"
        stage = BatchProcessorStage if options.engine == "python" else _StandIn
        self.processors = [
            stage(pipeline, name, index=index, ack=ack) for index in range(options.concurrency)
        ]
        self.turn = 0
        self.pool: WorkerPool[Batch, BatchResult] | None = None
        if not inline:
            work = [_worker(processor) for processor in self.processors]
            self.pool = WorkerPool(work, name=f"{pipeline.name}-{name}", ordered=False, waiting=1)


def _stage_of(name: str, options: Batcher) -> BatcherStage:
    """The batcher's state machine, for messages and :class:`Item`."""
    if isinstance(options.batch_size, tuple):
        initial, splitter = options.batch_size

        def split(item: Any, acc: Any) -> Any:
            return splitter(item.message if type(item) is Item else item, acc)

        options = replace(options, batch_size=(initial, split))
    # Asked by the processor: what the function raises there fails the message.
    partition = None if options.partition_by is None else lambda item: item.partition
    return BatcherStage(name, options, partition=partition)


class _StandIn(BatchProcessorStage):
    """A batch processor whose batches all succeed, ``handle_batch`` being Spark's to call."""

    def _call(self, messages: list[Message], info: BatchInfo, context: Any) -> list[Message]:
        return messages


def _worker(processor: BatchProcessorStage) -> Callable[[Batch], BatchResult]:
    return lambda batch: processor.handle(batch.messages, batch.info)


class Engine:
    """Drives a pipeline whose batchers are all ``engine="python"``.

    Batch processors work in threads where there are two or more of them in all.

    :param ack: Settles a stage's result: ``ack(successful, failed)``.
    :param inline: Do everything in the calling thread, for tests.
    :param stand_in: Let batches of Spark batchers succeed unhandled, for tests.
    :param stop: When no further message is begun, and when no further batch.
    :raises PipelineError: If a batcher's engine is Spark.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        clock: Clock | None = None,
        ack: Ack = ack_messages,
        inline: bool = False,
        stand_in: bool = False,
        stop: Stop | None = None,
    ) -> None:
        if not stand_in:
            check_engines(pipeline)
        self.pipeline = pipeline
        self.clock = clock or SystemClock()
        self._stop = stop or Stop(self.clock)
        self._ack = ack
        self._lock = threading.Lock()
        self._closed = False
        self._context = context_of(pipeline)
        counts = [options.concurrency for options in pipeline.batchers.values()]
        inline_batches = inline or sum(counts) <= 1
        self._batchers = {
            name: _Batcher(pipeline, name, self._settle, inline_batches)
            for name in pipeline.batchers
        }
        convert = Handing if pipeline.batchers else None
        self._processors = ProcessorPool(
            pipeline, ack=self._settle, convert=convert, stop=stop, inline=inline
        )
        #: Messages that failed, in either stage.
        self.failed = 0
        #: Keys of data that the schemas lack → how often they were dropped.
        self.dropped: Counter[str] = Counter()
        #: Why messages failed, in either stage.
        self.reasons = Reasons()
        #: (batcher, trigger) → batches handled.
        self.batches: Counter[tuple[str, str]] = Counter()
        #: Seconds of this thread's time: ``process``, ``batch``, ``handle_batch``.
        self.seconds: dict[str, float] = {"process": 0.0, "batch": 0.0, "handle_batch": 0.0}
        #: Called with the successful and the failed of each result that has been settled, by one
        #: thread at a time.
        self.on_settled: Callable[[list[Message], list[Message]], None] = lambda good, bad: None
        #: Called with each batch before ``handle_batch``.
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        if telemetry.handlers("topology.init"):
            telemetry.emit(
                "topology.init",
                {"system_time": time.time()},
                {"config": pipeline, "topology_name": pipeline.name},
            )

    def run(self, dispatches: Iterable[list[Message]]) -> None:
        """Feed every dispatch through, then deliver what is left in the batchers.

        :param dispatches: An empty one lets timeouts be looked at.
        """
        self.feed(dispatches)
        self.drain()

    def feed(self, dispatches: Iterable[list[Message]]) -> None:
        """Feed dispatches through the processors into the batchers."""
        started = time.monotonic()
        for _, result in self._processors.map(self._timely(dispatches), wait=self._wait):
            self.seconds["process"] += time.monotonic() - started
            self._forward(result.successful)
            self.tick()
            if self._stop.over():
                return
            started = time.monotonic()

    def _timely(self, dispatches: Iterable[list[Message]]) -> Iterator[list[Message]]:
        for dispatch in dispatches:
            if self._stop.late():
                return
            yield dispatch

    def _wait(self) -> float:
        patience = self.patience()
        return _LOOK if patience is None else min(patience, _LOOK)

    def patience(self) -> float | None:
        """Seconds until a batch's timeout; ``None`` if none is running."""
        due = [batcher.stage.next_due() for batcher in self._batchers.values()]
        running = [instant for instant in due if instant is not None]
        return max(0.0, min(running) - self.clock.monotonic()) if running else None

    def tick(self) -> None:
        """Deliver the batches whose timeout is over, and take note of those handled."""
        for name, batcher in self._batchers.items():
            self._deliver_due(name)
            if batcher.pool is not None:
                self._note(batcher.pool.take())

    def _deliver_due(self, name: str) -> None:
        batcher = self._batchers[name]
        due = batcher.stage.due(self.clock.monotonic())
        if due:
            self._deliver(name, due)
            if batcher.merger is not None:
                self._call(name, batcher.merger.flush())

    def drain(self) -> None:
        """Deliver all that is pending, in the order of the batchers, and wait until it is done."""
        for name, batcher in self._batchers.items():
            self._deliver(name, batcher.stage.flush())
            if batcher.merger is not None:
                self._call(name, batcher.merger.flush())
        for batcher in self._batchers.values():
            pool = batcher.pool
            while pool is not None and pool.under_way and not self._stop.late():
                pool.wait(_LOOK)
                self._note(pool.take())

    def close(self) -> None:
        """End the threads and processes; what they are at is not waited for, nor settled.

        Safe to repeat.
        """
        if self._closed:
            return
        with self._lock:
            self._closed = True
        self._processors.left()  # tells what they are at
        self._processors.close()
        for batcher in self._batchers.values():
            if batcher.pool is not None:
                done, batches = batcher.pool.left()
                self._note(done)
                tell_stuck(f"batcher {batcher.stage.name!r}", [each.messages for each in batches])
                batcher.pool.close()

    # -- inside --------------------------------------------------------------------------------

    def _settle(self, successful: list[Message], failed: list[Message]) -> None:
        """Count and settle a stage's result, in the thread that made it: what waits behind a chunk
        that is stuck counts all the same.
        """
        with self._lock:
            if self._closed:
                return  # the run has ended and given these back
            self.failed += len(failed)
        self.reasons.add(failed)
        self._ack(successful, failed)
        with self._lock:
            self.on_settled(successful, failed)

    def _forward(self, successful: list[Message]) -> None:
        if not self._batchers:
            return
        if len(self._batchers) == 1:
            if successful:
                self._batch(successful[0].batcher, successful)
            return
        routed: dict[str, list[Message]] = {}
        for message in successful:
            routed.setdefault(message.batcher, []).append(message)
        for name, messages in routed.items():
            self._batch(name, messages)

    def _batch(self, name: str, messages: list[Message]) -> None:
        started = time.monotonic()
        batcher = self._batchers[name]
        self._deliver_due(name)  # a batch whose timeout is over takes nothing more
        now = self.clock.monotonic()
        items = [self._item(each) if type(each.data) is Placed else each for each in messages]
        if telemetry.heard() and telemetry.handlers(*_BATCHER):
            closed: list[Closed] = []
            step = batcher.stage.chunk_size
            for start in range(0, len(items), step):
                closed += self._batch_told(batcher, items[start : start + step], now)
        else:
            closed = batcher.stage.add(items, now)
        self.seconds["batch"] += time.monotonic() - started
        if closed:
            self._deliver(name, closed)

    def _item(self, message: Message) -> Message | Item:
        """What a batcher takes of a message whose data is :class:`Placed`."""
        placed: Placed = message.data
        if placed.dropped:
            self.dropped.update(placed.dropped)
        item = item_of(message)
        if item.partition is None and type(item.batch_key) is str:
            return item.message
        return item

    def _batch_told(
        self, batcher: _Batcher, chunk: list[Message | Item], now: float
    ) -> list[Closed]:
        about = {
            "topology_name": self.pipeline.name,
            "name": batcher.telemetry_name,
            "batcher_key": batcher.stage.name,
            "context": self._context,
        }
        messages = [each.message if type(each) is Item else each for each in chunk]
        span = telemetry.Span("batcher", {**about, "messages": messages})
        try:
            closed = batcher.stage.add(chunk, now)
        except BaseException as error:
            span.exception("error", error, "")
            raise
        span.stop(about)
        return closed

    def _deliver(self, name: str, closed: list[Closed]) -> None:
        merger = self._batchers[name].merger
        self._call(name, [[each] for each in closed] if merger is None else merger.add(closed))

    def _call(self, name: str, calls: list[list[Closed]]) -> None:
        batcher = self._batchers[name]
        for call in calls:
            if self._stop.late():
                return
            batch = make_batch(self.pipeline.name, name, call, merged=batcher.merger is not None)
            self.on_batch(batch)
            lane = batch.info.partition
            if batcher.pool is None:
                if lane is None:
                    lane, batcher.turn = batcher.turn, (batcher.turn + 1) % len(batcher.processors)
                started = time.monotonic()
                result = batcher.processors[lane].handle(batch.messages, batch.info)
                self.seconds["handle_batch"] += time.monotonic() - started
                self._note([(batch, result)])
                continue
            while not batcher.pool.put(batch, lane, () if lane is not None else batch.keys, _LOOK):
                if self._stop.late():
                    return
                self._note(batcher.pool.take())
            self._note(batcher.pool.take())

    def _note(self, results: list[tuple[Batch, BatchResult]]) -> None:
        for batch, _ in results:
            self.batches[batch.batcher, batch.info.trigger.value] += 1


def check_engines(pipeline: Pipeline) -> None:
    """Check that every batcher runs in Python.

    :raises PipelineError: Naming the others, and what to do.
    """
    spark = [name for name, options in pipeline.batchers.items() if options.engine != "python"]
    if spark:
        raise PipelineError(
            f"batchers {spark} of {pipeline.name!r} run on Spark, which a run in one process has"
            ' not: give them engine="python", or run the pipeline\'s task group'
            " (BroadwayProcessorOperator, BroadwayBatcherOperator, BroadwaySparkSubmitOperator,"
            " BroadwayAckSensor)"
        )
