"""The stages of one process put together: processors, batchers, batch processors.

:class:`Engine` is fed with dispatches and drives everything after them; it knows no broker and no
budget.  ``run_local`` and ``BroadwayRunOperator`` feed it from a source, the test kit by hand.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.acknowledger import ack_messages
from airflow_broadway.core.batch_processor import BatchProcessorStage, BatchResult
from airflow_broadway.core.batcher import (
    BatcherStage,
    BatchHash,
    Closed,
    KeyMerger,
    partitioner,
)
from airflow_broadway.core.callbacks import context_of
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.message import BatchInfo, Message, Trigger
from airflow_broadway.core.pool import WorkerPool
from airflow_broadway.core.processor import ChunkResult
from airflow_broadway.core.processors import Ack, ProcessorPool

if TYPE_CHECKING:
    from airflow_broadway.core.broadway import Broadway

__all__ = ["Batch", "Engine", "make_batch"]


class Batch(NamedTuple):
    """A batch on its way to ``handle_batch``.

    :param keys: The keys in it: several with ``merge_keys``.
    """

    batcher: str
    messages: list[Message]
    info: BatchInfo
    keys: tuple[Any, ...]


def make_batch(pipeline: str, batcher: str, call: list[Closed]) -> Batch:
    """The batch of one ``handle_batch`` call: one closed batch, or several merged ones."""
    first = call[0]
    if len(call) == 1:
        messages: list[Message] = first.pending
        key, trigger = first.key, first.trigger
    else:
        messages = [message for closed in call for message in closed.pending]
        triggers = {closed.trigger for closed in call}
        key, trigger = None, triggers.pop() if len(triggers) == 1 else Trigger.SIZE
    ids = BatchHash(pipeline, batcher, key).update_all(message.message_id for message in messages)
    info = BatchInfo(
        batcher=batcher,
        batch_key=key,
        partition=first.partition,
        size=len(messages),
        trigger=trigger,
        batch_id=ids.hexdigest(),
        redelivered=sum([message.redelivered for message in messages]),
    )
    return Batch(batcher, messages, info, tuple([closed.key for closed in call]))


class _Batcher:
    """One batcher with its batch processors, in this thread or in threads of their own."""

    def __init__(self, pipeline: Broadway, name: str, ack: Ack, inline: bool) -> None:
        options = pipeline.batchers[name]
        self.stage = BatcherStage(name, options, partition=partitioner(options))
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
    :param late: Asked before each chunk and batch; once true, nothing more is begun.
    :raises PipelineError: If a batcher's engine is Spark.
    """

    def __init__(
        self,
        pipeline: Broadway,
        *,
        clock: Clock | None = None,
        ack: Ack = ack_messages,
        inline: bool = False,
        stand_in: bool = False,
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        if not stand_in:
            check_engines(pipeline)
        self.pipeline = pipeline
        self.clock = clock or SystemClock()
        self._late = late
        self._context = context_of(pipeline)
        counts = [options.concurrency for options in pipeline.batchers.values()]
        inline_batches = inline or sum(counts) <= 1
        self._batchers = {
            name: _Batcher(pipeline, name, ack, inline_batches) for name in pipeline.batchers
        }
        self._processors = ProcessorPool(pipeline, ack=ack, inline=inline)
        #: Messages by what the stages made of them: ``processed``, ``failed``, ``missing``.
        self.counts: Counter[str] = Counter()
        #: (batcher, trigger) → batches handled.
        self.batches: Counter[tuple[str, str]] = Counter()
        #: Seconds of this thread's time: ``process``, ``batch``, ``handle_batch``.
        self.seconds: dict[str, float] = {"process": 0.0, "batch": 0.0, "handle_batch": 0.0}
        #: Called with the successful and the failed of each result that has been settled.
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
        for chunk, result in self._processors.map(self._timely(dispatches), wait=self.patience):
            self.seconds["process"] += time.monotonic() - started
            self._forward(chunk, result)
            self.tick()
            if self._late():
                return
            started = time.monotonic()

    def _timely(self, dispatches: Iterable[list[Message]]) -> Iterator[list[Message]]:
        for dispatch in dispatches:
            if self._late():
                return
            yield dispatch

    def patience(self) -> float | None:
        """Seconds until a batch's timeout; ``None`` if none is running."""
        due = [batcher.stage.next_due() for batcher in self._batchers.values()]
        running = [instant for instant in due if instant is not None]
        return max(0.0, min(running) - self.clock.monotonic()) if running else None

    def tick(self) -> None:
        """Deliver the batches whose timeout is over, and take note of those handled."""
        now = self.clock.monotonic()
        for name, batcher in self._batchers.items():
            due = batcher.stage.due(now)
            if due:
                self._deliver(name, due)
                if batcher.merger is not None:
                    self._call(name, batcher.merger.flush())
            if batcher.pool is not None:
                self._settled(batcher.pool.take())

    def drain(self) -> None:
        """Deliver all that is pending, in the order of the batchers, and wait until it is done."""
        for name, batcher in self._batchers.items():
            self._deliver(name, batcher.stage.flush())
            if batcher.merger is not None:
                self._call(name, batcher.merger.flush())
        for batcher in self._batchers.values():
            pool = batcher.pool
            while pool is not None and pool.under_way and not self._late():
                pool.wait(0.5)
                self._settled(pool.take())

    def close(self) -> None:
        """End the threads and processes; what they are at is not waited for."""
        self._processors.close()
        for batcher in self._batchers.values():
            if batcher.pool is not None:
                batcher.pool.close()

    # -- inside --------------------------------------------------------------------------------

    def _forward(self, chunk: list[Message], result: ChunkResult) -> None:
        successful, failed = result
        self.counts["processed"] += len(chunk)
        self.counts["failed"] += len(failed)
        if not self._batchers:
            self.on_settled(successful, failed)
            return
        if failed:
            self.on_settled([], failed)
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
        batcher, now = self._batchers[name], self.clock.monotonic()
        if telemetry.handlers("batcher.start", "batcher.stop", "batcher.exception"):
            closed: list[Closed] = []
            step = batcher.stage.chunk_size
            for start in range(0, len(messages), step):
                closed += self._batch_told(batcher, messages[start : start + step], now)
        else:
            closed = batcher.stage.add(messages, now)
        self.seconds["batch"] += time.monotonic() - started
        if closed:
            self._deliver(name, closed)

    def _batch_told(self, batcher: _Batcher, chunk: list[Message], now: float) -> list[Closed]:
        about = {
            "topology_name": self.pipeline.name,
            "name": batcher.telemetry_name,
            "batcher_key": batcher.stage.name,
            "context": self._context,
        }
        span = telemetry.Span("batcher", {**about, "messages": chunk})
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
            if self._late():
                return
            batch = make_batch(self.pipeline.name, name, call)
            self.on_batch(batch)
            lane = batch.info.partition
            if batcher.pool is None:
                if lane is None:
                    lane, batcher.turn = batcher.turn, (batcher.turn + 1) % len(batcher.processors)
                started = time.monotonic()
                result = batcher.processors[lane].handle(batch.messages, batch.info)
                self.seconds["handle_batch"] += time.monotonic() - started
                self._settled([(batch, result)])
                continue
            while not batcher.pool.put(batch, lane, () if lane is not None else batch.keys, 0.5):
                if self._late():
                    return
                self._settled(batcher.pool.take())
            self._settled(batcher.pool.take())

    def _settled(self, results: list[tuple[Batch, BatchResult]]) -> None:
        for batch, result in results:
            self.batches[batch.batcher, batch.info.trigger.value] += 1
            self.counts["failed"] += len(result.failed)
            self.counts["missing"] += len(result.missing)
            self.on_settled(result.successful, result.failed)


def check_engines(pipeline: Broadway) -> None:
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
