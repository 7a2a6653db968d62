"""Runs the staged batches of a Python batcher and records their outcomes."""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from airflow_broadway.core.collector import rare_collections
from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.in_process import (
    check_settled,
    done_of,
    entry_of,
    settle_at_once,
)
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action
from airflow_broadway.core.errors import LeaseLapsed, StagingError
from airflow_broadway.core.formats.commits import Overtaken
from airflow_broadway.core.formats.deaths import TRIES, mark_begun, say_ended
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.core.formats.isolation import Step
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership, OwnershipLost, begin_try
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.acks import ack_messages_or_raise, is_settled
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.sink import CommitInDoubt
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.encoding import load_key
from airflow_broadway.core.stages.batch_order import chains
from airflow_broadway.core.stages.batch_processor import BatchProcessorStage, BatchResult
from airflow_broadway.core.stages.failure_log import Reasons
from airflow_broadway.core.stages.stop import STOP_CHECK_INTERVAL, Stop
from airflow_broadway.core.stages.worker_pool import WorkerPool
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.ports import Ports, producer_env
from airflow_broadway.runs.sinks import Commits
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)


@dataclass
class PythonBatches:
    """Runs ``handle_batch`` on each batch of ``plan`` that has no outcome yet.

    Runs ``concurrency`` batches at a time; those of one partition or key sequentially, in order.

    :param name: The task's name in the staging folder.  It fences off an earlier execution of the
        task, which the host may have lost while it still runs: that one can record nothing more.
        Without a name there is no fencing.
    :param step: The batches and their isolation: see
        :mod:`airflow_broadway.core.formats.isolation`.
    :param parent: The execution of the task whose child runs them; empty if there is no child.
    """

    staged: StagedRun
    pipeline: Pipeline
    plan: BatchPlan
    _: KW_ONLY
    name: str = ""
    try_number: int = 1
    ports: Ports = field(default_factory=Ports)
    step: Step = field(default_factory=Step)
    parent: str = ""

    def __post_init__(self) -> None:
        self._number = 0
        self._reasons = Reasons()
        self._stop = Stop(self.staged.clock, min(self.pipeline.shutdown, self.ports.max_shutdown))

    def stop(self) -> None:
        """Starts no further batch; waits up to the pipeline's ``shutdown`` for active ones.

        Called from a signal handler.
        """
        self._stop.request("signal")

    @rare_collections()
    def run(self) -> dict[str, int]:
        """Runs the batches; returns counts of batches, messages by result, and missing outcomes.

        :raises OwnershipLost: If a later run of the task has begun.
        :raises SinkError: If the batcher has another sink than when they were planned.
        """
        counts = _zero_counts()
        recorder = self._begin()
        try:
            self._run(recorder, counts)
        finally:  # an exception is no death of the process
            if self.name:
                say_ended(self.staged.files, self.name, self._number, TRIES)
        return counts

    def count(self) -> dict[str, int]:
        """Returns the same counts from recorded outcomes, without running anything."""
        counts, recorded = _zero_counts(), Recorded(self.staged)
        outcomes = recorded.recorded(self.plan)
        _count(counts, (outcomes.get(batch.batch_id) for batch in recorded.batches(self.plan)))
        return counts

    def _run(self, recorder: BatchRecorder, counts: dict[str, int]) -> None:
        options = self.pipeline.batchers[self.plan.batcher]
        self.plan.check_sink(options.commits_uri)
        # Read after fencing: from now on, an earlier execution records nothing that counts.
        outcome_reader = Recorded(self.staged)
        recorded = outcome_reader.recorded(self.plan)
        batches = self._chosen(outcome_reader)
        reader = BatchReader(self.staged, self.plan)
        # Sequentially, so that a death identifies its batch.
        concurrency = 1 if self.step.alone else options.concurrency
        sinks = [_BatchSink(self, index, reader, recorder) for index in range(concurrency)]
        pool: WorkerPool[PlannedBatch, Outcome | None] = WorkerPool(
            [partial(self._handle, sink) for sink in sinks],
            name=f"batch-{self.plan.batcher}",
            ordered=False,
        )
        try:
            self._feed(pool, batches, recorded, counts)
        except BaseException:  # also on KeyboardInterrupt and a time-out; re-raised
            self._stop.request("error", at_once=True)  # queued batches are not started
            raise
        finally:
            pool.close()
            reader.close()
            for sink in sinks:
                sink.close()
            self._reasons.log_table(log, f"batcher {self.plan.batcher!r}")
        recorder.finish()
        # Batches that a stop did not wait for have no outcome, or one unknown to this task.
        counts["without_outcome"] += len(batches) - counts["batches"]
        counts["batches"] = len(batches)

    def _chosen(self, recorded: Recorded) -> list[PlannedBatch]:
        """Returns the batches of this step, with and without an outcome."""
        batches = recorded.batches(self.plan)
        if self.step.run is None:
            return batches
        place = {batch_id: number for number, batch_id in enumerate(self.step.run)}
        chosen = [batch for batch in batches if batch.batch_id in place]
        return sorted(chosen, key=lambda batch: place[batch.batch_id])

    def _feed(
        self,
        pool: WorkerPool[PlannedBatch, Outcome | None],
        batches: Sequence[PlannedBatch],
        recorded: Mapping[str, Outcome],
        counts: dict[str, int],
    ) -> None:
        """Submits each batch without an outcome to the pool, and counts all results."""
        for planned in batches:
            if planned.batch_id in recorded:
                _count(counts, [recorded[planned.batch_id]])
                continue
            lane, keys = self._place(planned)
            while not self._stop.reason() and not pool.put(
                planned, lane, keys, STOP_CHECK_INTERVAL
            ):
                _count(counts, (outcome for _, outcome in pool.take()))
            if self._stop.reason():
                break
            _count(counts, (outcome for _, outcome in pool.take()))
        while pool.under_way and not self._stop.late():
            pool.wait(STOP_CHECK_INTERVAL)
            _count(counts, (outcome for _, outcome in pool.take()))

    def _place(self, planned: PlannedBatch) -> tuple[int | None, Sequence[str]]:
        """Returns the worker of a batch if it is bound to one, and the keys it waits for."""
        options = self.pipeline.batchers[self.plan.batcher]
        if planned.partition is None:
            return None, sorted(chains(planned, merged=options.merge_keys))
        if self.step.alone:
            return 0, ()
        # The plan is fixed, but the options may have changed since.
        return planned.partition % options.concurrency, ()

    def _begin(self) -> BatchRecorder:
        """Takes ownership from earlier executions of this task."""
        files = self.staged.files
        # Unique, since host and process id repeat: in containers the process id is always 1.
        unique = uuid.uuid4().hex[:8]
        writer = f"{self.try_number}-{socket.gethostname()}-{os.getpid()}-{unique}"
        if self.name:
            fields = {"version": VERSION, "by": writer, "plans": [self.plan.path]}
            fields |= {"marked": self.step.marked, "only": self.step.run, "parent": self.parent}
            self._number, _ = begin_try(files, self.name, lambda _: json.dumps(fields), TRIES)
        return BatchRecorder(
            files,
            self.plan,
            Ownership(files, self.name, self._number, folder=TRIES, clock=self.staged.clock),
            writer=writer,
            try_number=self.try_number,
            clock=self.staged.clock,
        )

    # -- one batch -----------------------------------------------------------------------------

    def _handle(self, sink: _BatchSink, planned: PlannedBatch) -> Outcome | None:
        """Runs one batch, unless the run no longer holds its messages."""
        if self._stop.reason():
            return None
        with log_ids(batcher=self.plan.batcher, batch_id=planned.batch_id):
            try:
                outcome, result = sink.handle(planned)
            except OwnershipLost:
                raise
            except (LeaseLapsed, CommitInDoubt) as error:
                log.error("Batch %s: %s.", planned.batch_id, error)
                return None
        self._reasons.add(result.failed)
        return outcome

    def mark(self, planned: PlannedBatch) -> None:
        """Marks a batch as begun, if its process is one that marks batches."""
        if self.step.marked:
            mark_begun(self.staged.files, self.name, self._number, TRIES, planned.batch_id)

    def settle_now(
        self, generation: str, entries: list[Entry]
    ) -> tuple[SettleReport, list[Entry], list[Entry]]:
        """Executes verdicts at the broker, for ``ack_immediately``; see :func:`settle_at_once`."""
        record = self.staged.generation(generation)
        env = producer_env(
            self.pipeline,
            self.ports,
            generation=generation,
            owner=record.lease["owner"],
            store=self.staged.store,
            clock=self.staged.clock,
        )
        with closing(self.pipeline.producer.custodian(env)) as custodian:
            return settle_at_once(custodian, self.staged.lease(generation), entries)


class _BatchSink:
    """Runs batches in one thread and collects the verdicts of each as lines of its entries file."""

    def __init__(
        self, batches: PythonBatches, index: int, reader: BatchReader, recorder: BatchRecorder
    ) -> None:
        plan, pipeline = batches.plan, batches.pipeline
        self._batches = batches
        self._reader = reader
        self._recorder = recorder
        self._processor = BatchProcessorStage(
            pipeline, plan.batcher, index=index, ack=ack_messages_or_raise, commit=self._commit
        )
        self._commits = Commits(pipeline, plan.batcher, batches.ports.connections)
        defers = pipeline.dead_letter_table is not None
        self._acknowledger = RunAcknowledger(pipeline.producer, self, defers=defers)
        self._generations = plan.generations
        self._has_sink = pipeline.batchers[plan.batcher].sink is not None

    def close(self) -> None:
        """Releases connections."""
        self._commits.close()

    def handle(self, planned: PlannedBatch) -> tuple[Outcome, BatchResult]:
        """Runs one batch and records its outcome."""
        batch = self._batch = self._recorder.begin(planned, load_key(planned.batch_key))
        self._batches.mark(planned)
        self._lines: list[str] = []
        self._settled_now = SettleReport()
        self._now: set[str] = set()
        self._released: set[str] = set()
        self._committed = False
        messages = self._messages = self._reader.read(planned, self._acknowledger)
        if len(messages) != planned.size:  # an unread message would count as a success
            raise StagingError(
                f"batch {planned.batch_id} holds {pluralize(planned.size, 'message')}, but"
                f" {len(messages)} were read from {self._batches.plan.path}: its files are damaged;"
                " clear the process task"
            )
        try:
            result = self._processor.handle(messages, batch.info, planned.refused)
        except Overtaken as overtaken:
            return batch.record_landed(overtaken.attempt), BatchResult([], [], [])
        if self._has_sink and not self._committed:
            unsuccessful = planned.size - len(result.successful)
            other = batch.record_other(self._commits.rule_out, unsuccessful)
            if other is not None:
                return other, BatchResult([], [], [])
        self._release(result)
        outcome = batch.record(
            successful=len(result.successful),
            failed=len({message.message_id for message in result.failed}),
            missing=len(result.missing),
            exceptions=batch.keep(self._lines),
            error=_single_error(result, planned.size),
            settled_now=self._settled_now.to_json(),
        )
        return outcome, result

    def _commit(
        self, rows: Any, info: BatchInfo, successful: list[Message], failed: list[Message]
    ) -> None:
        """Commits the batch's rows; first stores the verdicts on its other messages, if any."""
        ids = {message.message_id for message in (*successful, *failed)}
        missing = [message for message in self._messages if message.message_id not in ids]
        self._release(BatchResult(successful, failed, missing))
        commit = self._batch.begin_commit(
            self._batch.keep(self._lines),
            successful=len(successful),
            failed=len({message.message_id for message in failed}),
            missing=len(missing),
            settled_now=self._settled_now.to_json(),
        )
        self._commits.commit(rows, commit)
        self._committed = True

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        # A plain success needs no line: it gets the default verdict of the settlement.
        named = [judged for judged in successful if judged[1].action is not Action.ACK]
        for message, verdict in (*named, *failed):
            # A message settled immediately has its line already, even if the call raised.
            if message.message_id not in self._now:
                self._keep(message.acknowledger.ref, entry_of(message, verdict))

    def _keep(self, generation: str, entry: Entry, *, settled: bool = False) -> None:
        source = self._generations.index(generation)
        self._lines.append(dump_entry(entry, source=source, settled=settled))

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        by_generation: dict[str, list[Entry]] = {}
        for message, verdict in (*successful, *failed):
            if message.message_id not in self._now:
                entries = by_generation.setdefault(message.acknowledger.ref, [])
                entries.append(entry_of(message, verdict))
        for generation, entries in by_generation.items():
            report, done, _ = self._batches.settle_now(generation, entries)
            # Executed verdicts count, even if an error is raised to the callback.
            self._settled_now += done_of(report)
            for entry in done:
                self._keep(generation, entry, settled=True)
            self._now.update(entry.message_id for entry in done)
            check_settled(report)

    def _release(self, result: BatchResult) -> None:
        """Releases messages that the callbacks did not return; they must not count as successes."""
        lost = {message.message_id for message in result.missing} - self._now - self._released
        self._released |= lost
        for message in self._messages if lost else ():
            if message.message_id in lost and not is_settled(message):
                self._keep(message.acknowledger.ref, entry_of(message, RELEASE))


def _single_error(result: BatchResult, size: int) -> str:
    """Returns the error that failed the whole batch, if it was a single one."""
    if len(result.failed) != size or not result.failed:
        return ""
    reasons = {message.status.text for message in result.failed if message.status.kind != "failed"}
    return reasons.pop() if len(reasons) == 1 else ""


def _zero_counts() -> dict[str, int]:
    return {"batches": 0, "successful": 0, "failed": 0, "without_outcome": 0}


def _count(counts: dict[str, int], outcomes: Iterable[Outcome | None]) -> None:
    for outcome in outcomes:
        counts["batches"] += 1
        if outcome is None:
            counts["without_outcome"] += 1
        else:
            counts["successful"] += outcome.successful
            counts["failed"] += outcome.failed
