"""Run the staged batches of a Python batcher, and record what became of each."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence

from airflow_broadway.core.acknowledger import (
    Judged,
    RunAcknowledger,
    ack_messages_or_raise,
    is_settled,
)
from airflow_broadway.core.batch_processor import BatchProcessorStage, BatchResult
from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody import RELEASE, Action, Entry, SettleReport
from airflow_broadway.core.errors import LeaseLapsed, StagingError
from airflow_broadway.core.manifest import (
    BatchPlan,
    Outcome,
    PlannedBatch,
    Work,
    dump_entry,
    paths,
    plain_key,
)
from airflow_broadway.core.message import AckRef, BatchInfo, Message, Trigger
from airflow_broadway.core.pool import WorkerPool
from airflow_broadway.core.settler import entry_of, settled
from airflow_broadway.operators._common import AirflowConnections, producer_env
from airflow_broadway.spark.fence import Fence
from airflow_broadway.spark.turns import chains
from airflow_broadway.staging.reader import BatchReader, StagedReceipt
from airflow_broadway.staging.run import StagedRun

log = logging.getLogger(__name__)


class PythonBatches:
    """Runs ``handle_batch`` on each batch of ``plan`` that has no outcome yet.

    ``concurrency`` batches at a time; those of one partition or key one after another, in order.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Broadway,
        plan: BatchPlan,
        *,
        try_number: int = 1,
        connections: AirflowConnections | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.run_folder = run
        self.pipeline = pipeline
        self.plan = plan
        self._try_number = try_number
        self._connections = connections or AirflowConnections()
        self._clock = clock or SystemClock()
        # Unique, for a host and a process's number come again: in containers it is always 1.
        self._writer = f"{try_number}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._stopped = threading.Event()
        # The fence of Spark's driver; a Python batcher's task has no later try beside it.
        self._fence = Fence(
            run.files, Work(name="", try_number=0, pipeline={}, run={}, plans=[]), clock=self._clock
        )

    def stop(self) -> None:
        """Start no further batch.  Called from a signal handler."""
        self._stopped.set()

    def run(self) -> dict[str, int]:
        """Run them; counts of batches, of messages by result, and of batches without an outcome."""
        options = self.pipeline.batchers[self.plan.batcher]
        stages = [_Stage(self, index) for index in range(options.concurrency)]
        pool: WorkerPool[PlannedBatch, Outcome | None] = WorkerPool(
            [stage.handle for stage in stages], name=f"batch-{self.plan.batcher}", ordered=False
        )
        counts = {"batches": 0, "successful": 0, "failed": 0, "without_outcome": 0}
        try:
            for planned in self._batches():
                if planned.partition is None:
                    pool.put(planned, keys=sorted(chains(planned, merged=options.merge_keys)))
                else:  # a plan stands, though the options may have changed since
                    pool.put(planned, planned.partition % options.concurrency)
                _count(counts, pool)
            while pool.under_way:
                pool.wait()
                _count(counts, pool)
        finally:
            pool.close()
        return counts

    def _batches(self) -> Iterator[PlannedBatch]:
        _, batches = BatchPlan.read(self.run_folder.files, self.plan.path)
        return batches

    # -- one batch -----------------------------------------------------------------------------

    def handle(self, stage: _Stage, planned: PlannedBatch) -> Outcome | None:
        """Run one batch, unless it has an outcome or its messages are no longer held."""
        path = paths.outcome(self.plan.path, planned.batch_id)
        if self.run_folder.files.exists(path):
            return Outcome.loads(self.run_folder.files.read(path), path)
        if self._stopped.is_set() or not self._held(planned):
            return None
        started = self._clock.now()
        tick = self._clock.monotonic()
        stage.sink.begin()
        messages = stage.reader.read(planned, stage.ack_ref_of)
        if len(messages) != planned.size:  # what was not read would count as a success
            raise StagingError(
                f"batch {planned.batch_id} holds {planned.size} messages, but {len(messages)} were"
                f" read from {self.plan.path}: its files are damaged; clear the process task"
            )
        info = BatchInfo(
            self.plan.batcher,
            plain_key(planned.batch_key),
            planned.partition,
            planned.size,
            Trigger(planned.trigger),
            planned.batch_id,
            planned.redelivered,
            self._try_number,
        )
        result = stage.processor.handle(messages, info)
        stage.sink.give_back(messages, result)
        if not self._held(planned, fresh=True):
            return None
        seconds = self._clock.monotonic() - tick
        return self._record(planned, result, stage.sink, started.isoformat(), seconds)

    def _held(self, planned: PlannedBatch, *, fresh: bool = False) -> bool:
        try:
            self._fence.check(planned.sources, fresh=fresh)
        except LeaseLapsed as error:
            log.error("Batch %s: %s.", planned.batch_id, error)
            return False
        return True

    def _record(
        self,
        planned: PlannedBatch,
        result: BatchResult,
        sink: _BatchSink,
        started_at: str,
        seconds: float,
    ) -> Outcome:
        name: str | None = None
        if sink.lines:
            name = paths.outcome_entries(self.plan.path, planned.batch_id, self._writer)
            self.run_folder.files.write_lines(name, sink.lines)
        outcome = Outcome(
            batch_id=planned.batch_id,
            batcher=self.plan.batcher,
            plan=self.plan.path,
            successful=len(result.successful),
            failed=len(result.failed),
            missing=len(result.missing),
            entries=name,
            error=_common_error(result, planned.size),
            writer=self._writer,
            try_number=self._try_number,
            started_at=started_at,
            seconds=round(seconds, 6),
            settled_now=sink.settled_now.to_json(),
        )
        path = paths.outcome(self.plan.path, planned.batch_id)
        if not self.run_folder.files.create(path, outcome.dumps()):
            log.warning("Another try recorded batch %s first; this one's result is void.", path)
            return Outcome.loads(self.run_folder.files.read(path), path)
        return outcome

    def settle_now(self, generation: str, entries: list[Entry]) -> SettleReport:
        """Carry out verdicts at the broker, for ``ack_immediately``."""
        record = self.run_folder.generation(generation)
        custodian = self.pipeline.producer.custodian(
            producer_env(
                self.pipeline,
                generation=generation,
                owner=record.lease["owner"],
                store=self.run_folder.store,
                connections=self._connections,
                clock=self._clock,
            )
        )
        try:
            return settled(custodian.settle_now(self.run_folder.lease(generation), entries))
        finally:
            custodian.close()


class _Stage:
    """One of the batch processors: what its thread needs."""

    def __init__(self, batches: PythonBatches, index: int) -> None:
        plan, pipeline = batches.plan, batches.pipeline
        self._batches = batches
        self.processor = BatchProcessorStage(
            pipeline, plan.batcher, index=index, ack=ack_messages_or_raise
        )
        self.sink = _BatchSink(batches)
        self.reader = BatchReader(batches.run_folder, plan)
        self._acknowledger = RunAcknowledger(pipeline.producer, self.sink)
        self._generations = plan.generations

    def ack_ref_of(self, receipt: StagedReceipt) -> AckRef:
        """The acknowledger of one staged message: its generation is what it is settled with."""
        return AckRef(self._acknowledger, self._generations[receipt.source], receipt.delivery)

    def handle(self, planned: PlannedBatch) -> Outcome | None:
        return self._batches.handle(self, planned)


class _BatchSink:
    """Keeps the verdicts of one batch, as lines of its entries file."""

    def __init__(self, batches: PythonBatches) -> None:
        self._batches = batches
        self._sources = {name: index for index, name in enumerate(batches.plan.generations)}
        self.begin()

    def begin(self) -> None:
        """Start with another batch."""
        self.lines: list[str] = []
        self.settled_now = SettleReport()
        self._now: set[str] = set()

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        # A plain success needs no line: it gets what the settlement gives the rest.
        self.keep([judged for judged in successful if judged[1].action is not Action.ACK])
        self.keep(failed)

    def keep(self, judged: Sequence[Judged], *, settled: bool = False) -> None:
        """Keep a line for each."""
        for message, verdict in judged:
            source = self._sources[message.acknowledger.ref]
            entry = entry_of(message, verdict)
            self.lines.append(dump_entry(entry, source=source, settled=settled))

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        by_generation: dict[str, list[Entry]] = {}
        for message, verdict in (*successful, *failed):
            entries = by_generation.setdefault(message.acknowledger.ref, [])
            entries.append(entry_of(message, verdict))
        for generation, entries in by_generation.items():
            self.settled_now += self._batches.settle_now(generation, entries)
        self.keep([*successful, *failed], settled=True)
        self._now.update(message.message_id for message, _ in (*successful, *failed))

    def give_back(self, messages: Sequence[Message], result: BatchResult) -> None:
        """Release what the callbacks did not return, and failures that they made anew without what
        settles them: neither may be taken for a success.
        """
        lost = {message.message_id for message in result.missing}
        lost.update(message.message_id for message in result.failed if is_settled(message))
        if lost:
            self.keep(
                [
                    (message, RELEASE)
                    for message in messages
                    if message.message_id in lost
                    and message.message_id not in self._now
                    and not is_settled(message)
                ]
            )


def _common_error(result: BatchResult, size: int) -> str:
    """What failed the whole batch, if one thing did."""
    if len(result.failed) != size or not result.failed:
        return ""
    reasons = {message.status.text for message in result.failed if message.status.kind != "failed"}
    return reasons.pop() if len(reasons) == 1 else ""


def _count(counts: dict[str, int], pool: WorkerPool[PlannedBatch, Outcome | None]) -> None:
    for _, outcome in pool.take():
        counts["batches"] += 1
        if outcome is None:
            counts["without_outcome"] += 1
        else:
            counts["successful"] += outcome.successful
            counts["failed"] += outcome.failed
