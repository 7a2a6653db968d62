"""Replays the batches of a past run with the same messages, boundaries and ids.

The process task writes the past run's batches as plans of its own generation, and the batch tasks
run these plans.  Nothing is settled at a broker.  The outcomes of the past run are unchanged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import pyarrow as pa

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.model.run_source import RUN, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.ports import Ports, open_generation
from airflow_broadway.runs.reading.batches import StagedBatch, staged_batches
from airflow_broadway.runs.reading.runs import find_run
from airflow_broadway.runs.sinks import claim_interval
from airflow_broadway.runs.sources.archived import LEASE_SECONDS, NEVER_LAPSES
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import folder_of, new_name
from airflow_broadway.staging.run_folder import OPENED, StagedRun
from airflow_broadway.staging.store import host_name
from airflow_broadway.staging.tables import ParquetFile, TableFiles

log = logging.getLogger(__name__)

#: Distance between the positions of merged generations; larger than any generation.
_POSITION_STRIDE: Final = 2**40


def chosen_batches(run: StagedRun, pipeline: Pipeline) -> tuple[StagedRun, list[StagedBatch]]:
    """Returns the past run that is the source of this run, and the batches to replay.

    :raises RequestRefused: If there is no such run, or its batches cannot be replayed.
    """
    source = pipeline.run.source
    past = find_run(run.store, run.dag_id, source.run_id, run.pipeline)
    chosen = _choose(past, source.only.get("batches", ()))
    _check_batchers(past, pipeline, chosen)
    return past, chosen


def _choose(run: StagedRun, batch_ids: Collection[str]) -> list[StagedBatch]:
    """Returns the batches with an outcome, or those that are named.

    The messages of a batch without an outcome are released and handled by another run, so such a
    batch is replayed only by name.  The same holds for a batch of an execution whose past interval
    the run read once more later: the rows of that execution were replaced.

    :raises RequestRefused: If no batch is left, or a named batch does not exist.
    """
    batches = list(staged_batches(Recorded(run)))
    if not batches:
        raise RequestRefused(
            f"run {run.run_id!r} has no staged batches: none of its batcher tasks has finished"
        )
    if batch_ids:
        requested = set(batch_ids)
        chosen = [batch for batch in batches if batch.planned.batch_id in requested]
        unknown = sorted(requested - {batch.planned.batch_id for batch in chosen})
        if unknown:
            raise RequestRefused(
                f"run {run.run_id!r} has no batch {', '.join(unknown)}: `airflow-broadway show`"
                " lists its batches"
            )
        return chosen
    replaced = _find_replaced(run)
    chosen = [
        batch
        for batch in batches
        if batch.outcome is not None and replaced.isdisjoint(batch.plan.generations)
    ]
    if not chosen:
        raise RequestRefused(
            f"none of {pluralize(len(batches), 'batch')} of run {run.run_id!r} was handled: their"
            " messages return to the queue, and the next run handles them; to replay some"
            " nevertheless, name them in source_batches"
        )
    return chosen


def _find_replaced(run: StagedRun) -> set[str]:
    """Returns the generations replaced by the last one that read a past interval or a past run."""
    records = run.generations()
    # Only the first producer reads a past run or prepares the sink.
    past = [
        record
        for record in records
        if record.map_index <= 0
        and record.state != OPENED
        and RunSource.from_json(record.source).is_whole
    ]
    if not past:
        return set()
    last = max(past, key=lambda record: record.opened_at)
    begun = last.opened_at
    if RunSource.from_json(last.source).goes_on:
        begun = min(record.opened_at for record in records if record.source == last.source)
    return {record.generation for record in records if record.opened_at < begun}


def _check_batchers(run: StagedRun, pipeline: Pipeline, chosen: Sequence[StagedBatch]) -> None:
    """Rejects a pipeline that cannot handle these batches.

    :raises RequestRefused: If it lacks a batcher, or the batcher has another engine.
    """
    for plan in {batch.plan.path: batch.plan for batch in chosen}.values():
        batcher = pipeline.batchers.get(plan.batcher)
        if batcher is None:
            raise RequestRefused(
                f"the pipeline {pipeline.name!r} has no batcher {plan.batcher!r}; it has"
                f" {sorted(pipeline.batchers)}"
            )
        staged = _staged_engine(run, plan)
        if staged not in (None, batcher.engine):
            raise RequestRefused(
                f"the batches of {plan.batcher!r} were staged for engine={staged!r}, and the"
                f" pipeline now has engine={batcher.engine!r}: replay them with the previous"
                " version of the class"
            )


def _staged_engine(run: StagedRun, plan: BatchPlan) -> str | None:
    """Returns the engine for which a plan's data was staged; ``None`` if there is no data."""
    for name in plan.data:
        path = f"{plan.path}/{name}"
        if run.files.exists(path):
            with ParquetFile(run.files, path) as file:
                return "python" if "_flush" in file.columns else "spark"
    return None


def _check_data(run: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch]) -> None:
    """Checks that the data of batches exists.

    :raises RequestRefused: If it does not.
    """
    run.store.check_root(plan.root_id, plan.host)
    for index in sorted({file for batch in batches for file in batch.files}):
        path = f"{plan.path}/{plan.data[index]}"
        if not run.files.exists(path):
            raise RequestRefused(
                f"the staged data of run {run.run_id!r} is missing:"
                f" {run.store.uri}/{run.path}/{path} does not exist, so its batches cannot be"
                " replayed (it was removed by retention or by hand)"
            )


@dataclass
class PastRun:
    """The process task of a run whose source is a past run; see :class:`.runs.process.Process`."""

    staged: StagedRun
    pipeline: Pipeline
    env: ProducerEnv
    ports: Ports
    timed_out: ClassVar = False
    trouble: ClassVar = ""
    receives: ClassVar = 0

    def stop(self, reason: str) -> None:
        """Does nothing: the task ends within the stop timeout anyway."""

    def run(self) -> dict[str, Any]:
        """Writes the past run's batches as this run's plans; returns the reference.

        :raises RequestRefused: If there is no such run, or its batches cannot be replayed.
        :raises StagingError: If staging fails.
        """
        started = self.env.clock.now()
        chosen: list[StagedBatch] = []
        if not self.env.index:
            self._past, chosen = chosen_batches(self.staged, self.pipeline)
        lease = Lease(
            kind=RUN,
            generation=self.env.generation,
            seconds=LEASE_SECONDS,
            deadline=NEVER_LAPSES,
            owner=dict(self.env.owner),
        )
        record = open_generation(self.staged, self.pipeline, lease)
        claim_interval(self.staged, self.pipeline, record, self.ports.is_over)
        by_batcher: dict[str, list[StagedBatch]] = {}
        for batch in chosen:
            by_batcher.setdefault(batch.plan.batcher, []).append(batch)
        counts = {name: self._plan(name, rows).messages for name, rows in by_batcher.items()}
        manifest = Manifest(
            generation=self.env.generation,
            root_id=self.staged.store.root_id(),
            host=host_name(),
            lease=lease.to_json(),
            received=sum(counts.values()),
            received_bytes=sum(batch.planned.bytes for batch in chosen),
            failed=0,
            settled_now={},
            batchers=counts,
            files={},
            entries=[],
            configured=False,
            dropped={},
            stopped="empty",
            started_at=started.isoformat(),
            ended_at=self.env.clock.now().isoformat(),
            received_files=self._copy_received(chosen),
        )
        self.staged.put_lease(lease)
        self.staged.publish(manifest)
        past = self.pipeline.run.source.run_id
        log.info("%s of run %s will be replayed.", pluralize(len(chosen), "batch"), past)
        return manifest.reference()

    def _copy_received(self, chosen: Sequence[StagedBatch]) -> list[str]:
        """Copies the past run's files of received messages, as far as they exist."""
        if not chosen or self.pipeline.dead_letter_table is None:
            return []
        names = dict.fromkeys(name for batch in chosen for name in batch.plan.generations)
        manifests = filter(None, map(self._past.manifest, names))
        copies = []
        for number, path in enumerate(p for m in manifests for p in m.received_files):
            copy = f"{self.env.generation}/received-{number:05d}.parquet"
            with suppress(FileNotFoundError):
                self._past.files.copy(path, self.staged.files, copy)
                copies.append(copy)
        return copies

    # -- plans ---------------------------------------------------------------------------------

    def _plan(self, batcher: str, chosen: Sequence[StagedBatch]) -> BatchPlan:
        """Writes the plan of one batcher, with the same batches under this generation."""
        run, generation = self.staged, self.env.generation
        path = f"{folder_of(batcher, [generation])}/{new_name(run, 'run')}"
        plans: dict[str, tuple[BatchPlan, list[PlannedBatch]]] = {}
        for plan, planned, _ in chosen:
            plans.setdefault(plan.path, (plan, []))[1].append(planned)
        data: list[str] = []
        replayed: list[PlannedBatch] = []
        for plan, batches in plans.values():
            _check_data(self._past, plan, batches)
            if len(plans) == 1 and len(plan.generations) == 1:
                names, offset = self._link(plan, path), 0
            else:
                offset = max((row[1] + 1 for batch in replayed for row in batch.rows), default=0)
                names = self._rewrite(plan, path, offset, len(data))
            replayed += [self._batch(batch, len(data), offset) for batch in batches]
            data += names
        first = next(iter(plans.values()))[0]
        return self._write(first, path, data, replayed)

    def _batch(self, batch: PlannedBatch, files: int, offset: int) -> PlannedBatch:
        return replace(
            batch,
            files=[files + index for index in batch.files],
            rows=[[low + offset, high + offset] for low, high in batch.rows],
            redelivered=batch.size,
            sources={self.env.generation: batch.size},
            part=batch.part and [[0, source * _POSITION_STRIDE + at] for source, at in batch.part],
            error="",  # the splitter may have been fixed since
        )

    def _link(self, plan: BatchPlan, path: str) -> list[str]:
        for name in plan.data:
            self._past.files.copy(f"{plan.path}/{name}", self.staged.files, f"{path}/{name}")
        return list(plan.data)

    def _rewrite(self, plan: BatchPlan, path: str, offset: int, number: int) -> list[str]:
        """Rewrites data files with this one generation and consecutive batch numbers."""
        names = []
        for index, name in enumerate(plan.data, number):
            with ParquetFile(self._past.files, f"{plan.path}/{name}") as file:
                target: TableFiles | None = None
                for group in range(file.groups):
                    table = _renumber(file.read(group), offset)
                    if target is None:
                        stem = f"{path}/again-{index:05d}"
                        target = TableFiles(self.staged.files, stem, table.schema, whole=True)
                    target.write([table])
                if target is not None:
                    target.close()
                    names.append(target.paths[0].rpartition("/")[2])
        return names

    def _write(
        self, plan: BatchPlan, path: str, data: list[str], batches: list[PlannedBatch]
    ) -> BatchPlan:
        lines = [batch.dumps() for batch in batches]
        summing = Summing()
        for _ in summing.through(lines):
            pass
        new_plan = replace(
            plan,
            path=path,
            generations=[self.env.generation],
            data=data,
            messages=sum(batch.size for batch in batches),
            batches=len(batches),
            triggers=dict(Counter(batch.trigger for batch in batches)),
            notes=[],
            sink=self.pipeline.batchers[plan.batcher].commits_uri,
            lines=summing.to_json(),
        )
        self.staged.files.write_lines(f"{path}/plan.jsonl", [new_plan.dumps(), *lines])
        return new_plan


def _renumber(table: pa.Table, offset: int) -> pa.Table:
    # Positions are per generation, and parts of a split batch refer to source and position.
    before = pc.multiply(table["source"].cast(pa.int64()), _POSITION_STRIDE)
    for name, column in (
        ("position", pc.add(table["position"], before)),
        ("source", array_of([0] * table.num_rows, pa.int32())),
        ("batch", pc.add(table["batch"], offset)),
    ):
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(place), column)
    return table
