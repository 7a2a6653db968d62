"""Run the staged batches of a Python batcher, and record what became of each."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator

from airflow_broadway.core.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.batch_processor import BatchProcessorStage, BatchResult
from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody import RELEASE, Action, Entry, SettleReport
from airflow_broadway.core.manifest import BatchPlan, Outcome, PlannedBatch, dump_entry, paths
from airflow_broadway.core.message import AckRef, BatchInfo, Trigger
from airflow_broadway.core.pool import WorkerPool
from airflow_broadway.core.settler import entry_of
from airflow_broadway.operators._common import AirflowConnections, producer_env
from airflow_broadway.staging.planner import read_batch
from airflow_broadway.staging.run import StagedRun

log = logging.getLogger(__name__)


class PythonBatches:
    """Runs ``handle_batch`` on each batch of ``plan`` that has no outcome yet.

    ``concurrency`` batches at a time; those of one partition one after another, in order.
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
        self._run = run
        self._pipeline = pipeline
        self._plan = plan
        self._try_number = try_number
        self._connections = connections or AirflowConnections()
        self._clock = clock or SystemClock()
        self._writer = f"{try_number}-{socket.gethostname()}-{os.getpid()}"
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Start no further batch.  Called from a signal handler."""
        self._stopped.set()

    def run(self) -> dict[str, int]:
        """Run them; counts of batches, of messages by result, and of batches without an outcome."""
        options = self._pipeline.batchers[self._plan.batcher]
        stages = [
            _Stage(self, BatchProcessorStage(self._pipeline, self._plan.batcher, index=index))
            for index in range(options.concurrency)
        ]
        pool: WorkerPool[PlannedBatch, Outcome | None] = WorkerPool(
            [stage.handle for stage in stages], name=f"batch-{self._plan.batcher}", ordered=False
        )
        counts = {"batches": 0, "successful": 0, "failed": 0, "without_outcome": 0}
        try:
            for planned in self._batches():
                pool.put(planned, planned.partition)
                _count(counts, pool)
            while pool.under_way:
                pool.wait()
                _count(counts, pool)
        finally:
            pool.close()
        return counts

    def _batches(self) -> Iterator[PlannedBatch]:
        _, batches = BatchPlan.read(self._run.files, self._plan.path)
        return batches

    # -- one batch -----------------------------------------------------------------------------

    def handle(self, stage: BatchProcessorStage, planned: PlannedBatch) -> Outcome | None:
        """Run one batch, unless it has an outcome or its messages are no longer held."""
        path = paths.outcome(self._plan.batcher, planned.batch_id)
        if self._run.files.exists(path):
            return Outcome.loads(self._run.files.read(path), path)
        if self._stopped.is_set() or not self._held(planned):
            return None
        started = self._clock.now()
        tick = self._clock.monotonic()
        sink = _BatchSink(self, planned)
        acknowledger = RunAcknowledger(self._pipeline.producer, sink)
        messages = read_batch(
            self._run,
            self._plan,
            planned,
            lambda source, data: AckRef(acknowledger, source, data),
        )
        info = BatchInfo(
            self._plan.batcher,
            planned.batch_key,
            planned.partition,
            planned.size,
            Trigger(planned.trigger),
            planned.batch_id,
            planned.redelivered,
            self._try_number,
        )
        result = stage.handle(messages, info)
        if not self._held(planned):
            return None
        return self._record(
            planned, result, sink, started.isoformat(), self._clock.monotonic() - tick
        )

    def _held(self, planned: PlannedBatch) -> bool:
        for generation in planned.sources:
            if self._run.void(generation):
                log.error(
                    "Batch %s: this run no longer holds its messages (generation %s was given back"
                    " or has lapsed): clear `process`.",
                    planned.batch_id,
                    generation,
                )
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
        entries = [*sink.entries, *(entry_of(message, RELEASE) for message in result.missing)]
        name: str | None = None
        if entries:
            name = paths.outcome_entries(self._plan.batcher, planned.batch_id, self._writer)
            self._run.files.write_lines(name, map(dump_entry, entries))
        outcome = Outcome(
            batch_id=planned.batch_id,
            batcher=self._plan.batcher,
            plan=self._plan.path,
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
        path = paths.outcome(self._plan.batcher, planned.batch_id)
        if not self._run.files.create(path, outcome.dumps()):
            log.warning("Another try recorded batch %s first; this one's result is void.", path)
            return Outcome.loads(self._run.files.read(path), path)
        return outcome

    def settle_now(self, generation: str, entries: list[Entry]) -> SettleReport:
        """Carry out verdicts at the broker, for ``ack_immediately``."""
        record = self._run.generation(generation)
        custodian = self._pipeline.producer.custodian(
            producer_env(
                self._pipeline,
                generation=generation,
                owner=record.lease["owner"],
                store=self._run.store,
                connections=self._connections,
                clock=self._clock,
            )
        )
        try:
            return custodian.settle_now(self._run.lease(generation), entries)
        finally:
            custodian.close()


class _Stage:
    """A batch processor and the batches it is given."""

    def __init__(self, batches: PythonBatches, stage: BatchProcessorStage) -> None:
        self._batches = batches
        self._stage = stage

    def handle(self, planned: PlannedBatch) -> Outcome | None:
        return self._batches.handle(self._stage, planned)


class _BatchSink:
    """Keeps the verdicts of one batch."""

    def __init__(self, batches: PythonBatches, planned: PlannedBatch) -> None:
        self._batches = batches
        self.entries: list[Entry] = []
        self.settled_now = SettleReport()

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        self.entries += [
            entry_of(message, verdict)
            for message, verdict in successful
            if verdict.action is not Action.ACK
        ]
        self.entries += [entry_of(message, verdict) for message, verdict in failed]

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        by_generation: dict[str, list[Entry]] = {}
        for message, verdict in [*successful, *failed]:
            by_generation.setdefault(message.acknowledger.ref, []).append(
                entry_of(message, verdict)
            )
        for generation, entries in by_generation.items():
            self.settled_now += self._batches.settle_now(generation, entries)


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
