"""Shared by the tests of staging: a run on a temporary disk, and generations of messages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow_broadway import Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Delivery, Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.entries import dump_entry as dump
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.stages.staged_row import RowConverter
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.staging.writer import ProcessWriter
from airflow_broadway.testing import ManualClock

START = datetime(2026, 1, 1, tzinfo=UTC)


@options
class Silent(Producer):
    """A producer that is never opened."""

    kind = "silent"


@options
class Republishing(Silent):
    """One that settles by publishing again."""

    keeps_payload = True


class NoAcknowledger:
    """Stands for an acknowledger, and must not be called."""


ACKNOWLEDGER = NoAcknowledger()


def pipeline_of(producer: Producer | None = None, **batchers: Batcher) -> Broadway:
    """A pipeline with these batchers."""
    attributes = {"producer": producer or Silent(), "batchers": batchers}
    pipeline: Broadway = type("Pipeline", (Broadway,), attributes)()
    return pipeline


def open_run(
    root: Path | str, run_id: str = "run:1", clock: ManualClock | None = None
) -> StagedRun:
    """A run below a root."""
    uri = str(root) if "://" in str(root) else f"file://{root}"
    names = {"pipeline": "Pipeline", "dag_id": "dag", "run_id": run_id}
    return StagedRun(Store.open(uri), **names, clock=clock or ManualClock())


def lease_of(generation: str, *, seconds: float = 900.0) -> Lease:
    """A lease from the start of time."""
    return Lease(
        kind="silent",
        generation=generation,
        seconds=seconds,
        deadline=START + timedelta(seconds=seconds),
        owner={"task_id": "process"},
    )


def message(number: int, data: Any = b"data", *, at: float = 0.0, **fields: Any) -> Message:
    """A message that a producer delivered ``at`` seconds after the start."""
    delivery = fields.pop("delivery", Delivery(receipt=f"receipt-{number}"))
    return Message(
        data,
        message_id=fields.pop("message_id", f"m-{number}"),
        acknowledger=AckRef(ACKNOWLEDGER, "ref", delivery),
        received_at=START + timedelta(seconds=at),
        position=number,
        size=fields.pop("size", len(data) if isinstance(data, bytes) else 10),
        **fields,
    )


def open_generation(
    run: StagedRun, *, map_index: int = 0, try_number: int = 1, task_id: str = "process"
) -> GenerationRecord:
    """Open a generation."""
    lease = lease_of(uuid.uuid4().hex)
    return run.open_generation(
        task_id=task_id, map_index=map_index, try_number=try_number, lease=lease
    )


def manifest_of(
    run: StagedRun,
    generation: str,
    received: int,
    *,
    settled_now: SettleReport | None = None,
    **fields: Any,
) -> Manifest:
    """A manifest."""
    nothing: dict[str, Any] = {"batchers": {}, "files": {}, "entries": [], "dropped": {}}
    counts: dict[str, Any] = {"received_bytes": 0, "failed": 0, "configured": False}
    times = dict.fromkeys(("started_at", "ended_at"), START.isoformat())
    return Manifest(
        generation=generation,
        root_id=run.store.root_id(),
        host="here",
        lease=lease_of(generation).to_json(),
        received=received,
        settled_now=(settled_now or SettleReport()).to_json(),
        **{"stopped": "empty", **nothing, **counts, **times, **fields},
    )


def stage(writer: ProcessWriter, pipeline: Broadway, *messages: Message) -> None:
    """Stage messages as the successes of one chunk."""
    rows = RowConverter(pipeline)
    writer.messages([rows(message) for message in messages])


def publish(
    run: StagedRun,
    pipeline: Broadway,
    chunks: Iterable[Sequence[Message]],
    *,
    map_index: int = 0,
    entries: Sequence[Entry] = (),
    settled: Sequence[Entry] = (),
    settled_now: SettleReport | None = None,
) -> str:
    """Open a generation, stage messages in it, publish it; returns its name."""
    generation = open_generation(run, map_index=map_index).generation
    rows = RowConverter(pipeline)
    received = len(entries) + len(settled)
    with ProcessWriter(run, generation, pipeline) as writer:
        for chunk in chunks:
            writer.messages([rows(message) for message in chunk])
            received += len(chunk)
        writer.entries(entries)
        writer.entries(settled, settled=True)
    written = writer.close()
    manifest = manifest_of(run, generation, received, settled_now=settled_now, **asdict(written))
    assert run.publish(manifest)
    return generation


def batches_of(run: StagedRun, plan: BatchPlan) -> list[PlannedBatch]:
    """The batches of a plan."""
    return list(BatchPlan.read(run.files, plan.path)[1])


def read_batch(run: StagedRun, plan: BatchPlan, batch: PlannedBatch) -> list[Message]:
    """The messages of a batch."""
    with BatchReader(run, plan) as reader:
        return reader.read(batch)


def python_pipeline(**options: Any) -> Broadway:
    """A pipeline with the Python batcher ``b``."""
    batcher = {"engine": "python", "batch_timeout": None, "batch_size": 3, **options}
    return pipeline_of(b=Batcher(**batcher))


def stream(count: int, start: int = 0, **fields: Any) -> list[Message]:
    """Messages for the batcher ``b``, numbered from ``start``."""
    return [message(number, batcher="b", **fields) for number in range(start, start + count)]


def plan_of(
    run: StagedRun, pipeline: Broadway, *generations: str, batcher: str = "b"
) -> tuple[BatchPlan, list[PlannedBatch]]:
    """Plan a batcher; the plan and its batches."""
    plan = plan_batches(run, pipeline, batcher, generations, try_label="1")
    return plan, batches_of(run, plan)


def ids(run: StagedRun, plan: BatchPlan, batch: PlannedBatch) -> list[int]:
    """The numbers of a batch's messages."""
    return [message.position for message in read_batch(run, plan, batch)]


def record_outcome(
    run: StagedRun,
    plan: BatchPlan,
    batch: PlannedBatch,
    *,
    entries: Sequence[Entry] = (),
    sources: Sequence[int | None] = (),
    settled: Sequence[Entry] = (),
) -> None:
    """Record the outcome of one batch."""
    name = None
    summing = Summing()
    if entries or settled:
        name = paths.outcome_entries(plan.path, batch.batch_id, "test")
        entry_sources = list(sources) or [None] * len(entries)
        lines = [dump(entry, source=at) for entry, at in zip(entries, entry_sources, strict=True)]
        lines += [dump(entry, settled=True) for entry in settled]
        run.files.write_lines(name, summing.through(lines))
    outcome = Outcome(
        batch_id=batch.batch_id,
        batcher=plan.batcher,
        plan=plan.path,
        successful=batch.size - len(entries),
        failed=len(entries),
        entries=name,
        entries_sum=summing.to_json() if name else None,
    )
    assert run.files.create(paths.outcome(plan.path, batch.batch_id), outcome.dumps())


class FakeCustodian:
    """Settles in memory; has the ids of all leases, and their verdicts."""

    def __init__(self, leases: dict[str, list[str]]) -> None:
        self.leased = {generation: set(ids) for generation, ids in leases.items()}
        self.verdicts: dict[str, str] = {}
        self.calls = 0
        self.before: Callable[[], None] = lambda: None

    def renew(self, lease: Lease) -> Lease | None:
        return lease

    def holds(self, lease: Lease) -> bool:
        return bool(self.leased.get(lease.generation))

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        raise TypeError("this custodian settles at the end only")

    def close(self) -> None:
        return None

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        self.calls += 1
        self.before()
        leased = self.leased[lease.generation]
        own = {entry.message_id: entry.verdict.action.value for entry in settlement.entries()}
        for message_id in leased:
            self.verdicts.setdefault(message_id, own.get(message_id, settlement.rest.action.value))
        counted = [self.verdicts[message_id] for message_id in leased]
        count = counted.count
        counts: Any = {"requeued": count("retry"), "dead_lettered": count("dead_letter")}
        counts |= {"acked": count("ack"), "left": count("leave"), "released": count("release")}
        return SettleReport(**counts)
