"""Plans the batches of a batcher in a run.

A plan is a pure function of the published generations.  See
:mod:`airflow_broadway.staging.batching` for the assignment of messages to batches,
:mod:`airflow_broadway.staging.plan_data_files` for their files, and
:mod:`airflow_broadway.staging.plan_choice` for the choice among several plans.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC
from typing import IO, Any

import pyarrow as pa

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.receiving import demand_of
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.batching import Batching
from airflow_broadway.staging.merge_generations import SOURCE, merged, only_bytes
from airflow_broadway.staging.plan_choice import Recorded, planned_in
from airflow_broadway.staging.plan_data_files import DataFiles
from airflow_broadway.staging.run_folder import OPENED, StagedRun
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)

#: Spark batches of one batcher in one run above which a warning is logged.
MANY_BATCHES = 1000

#: Minimum of the positions by which messages of an ordered source may be out of order.
#: Processors of another machine may take more messages at a time than those here.
LEAST_DISORDER = 16_384

#: Bytes of a plan's lines in memory until the plan is written.
_LINES_IN_MEMORY = 8 * 1024 * 1024


def plan_batches(
    run: StagedRun, pipeline: Pipeline, batcher: str, generations: Sequence[str], *, try_label: str
) -> BatchPlan:
    """Plans the batches of one batcher from the published ``generations``, and writes the plan.

    Generations that were released or never published are skipped and logged.  An existing plan of
    the same generations is kept even if the options have changed since, because a killed callback
    may have written data with the ids of its batches.

    :param generations: In an order that is the same in every try.
    :param try_label: The try of the task, e.g. ``"2"``; a part of the folder's name.
    :returns: The plan's header; its ``notes`` are warnings for display.
    :raises StagingError: If files cannot be read or written, or are under another root.
    """
    manifests = _read_published(run, batcher, generations)
    folder = folder_of(batcher, [manifest.generation for manifest in manifests])
    top, _, inputs = folder.rpartition("/")
    planned = run.files.list(top)
    standing = Recorded(run).standing_in(folder) if inputs in planned else None
    if standing is not None:
        log.info(
            "batcher %r: the plan %s stands; %d of its %s have an outcome",
            batcher,
            standing[1].path,
            standing[0],
            pluralize(standing[1].batches, "batch"),
        )
        return standing[1]
    seen = planned_in(run, [f"{top}/{name}" for name in planned if name != inputs])
    # Sources whose messages may have been handled in batches of another plan.
    again = [index for index, manifest in enumerate(manifests) if manifest.generation in seen]
    path = f"{folder}/{new_name(run, try_label)}"
    plan = _Planning(run, pipeline, batcher, manifests, path).make(again)
    for note in plan.notes:
        log.warning("batcher %r: %s", batcher, note)
    return plan


def planned_with_others(run: StagedRun, batcher: str, generations: Sequence[str]) -> list[str]:
    """Returns the published ones of generations, if they are only in plans with other ones."""
    published = [name for name in dict.fromkeys(generations) if run.generation(name).published]
    top, _, inputs = folder_of(batcher, published).rpartition("/")
    planned = run.files.list(top)
    if inputs in planned and Recorded(run).standing_in(f"{top}/{inputs}") is not None:
        return []
    seen = planned_in(run, [f"{top}/{name}" for name in planned if name != inputs])
    return [name for name in published if name in seen]


def folder_of(batcher: str, generations: Sequence[str]) -> str:
    """Returns the folder of a batcher's plans of these generations."""
    inputs = hashlib.sha256("\n".join(generations).encode()).hexdigest()
    return f"batches/{batcher}/{inputs[:16]}"


def _read_published(run: StagedRun, batcher: str, generations: Sequence[str]) -> list[Manifest]:
    """Reads the manifests of the generations that are published and not settled."""
    manifests: list[Manifest] = []
    for generation in dict.fromkeys(generations):
        record = run.generation(generation)
        if not record.published:
            log.info(
                "batcher %r: generation %s is left out, for it is %s",
                batcher,
                generation,
                "not published" if record.state == OPENED else "settled or released",
            )
            continue
        manifest = run.manifest(generation)
        if manifest is not None:
            manifests.append(manifest)
    return manifests


def new_name(run: StagedRun, try_label: str) -> str:
    """Creates a name for a plan's folder; the newest sorts last."""
    stamp = run.clock.now().astimezone(UTC).strftime("%Y%m%dT%H%M%S%f")
    label = re.sub(r"[^A-Za-z0-9-]+", "-", try_label)[:40] or "try"
    return f"{stamp}-{label}-{uuid.uuid4().hex[:8]}"


class _Planning:
    """The creation of one plan."""

    def __init__(
        self, run: StagedRun, pipeline: Pipeline, batcher: str, manifests: list[Manifest], path: str
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._batcher = batcher
        self._options: Batcher = pipeline.batchers[batcher]
        self._manifests = manifests
        self._path = path
        self._messages = 0
        # If the source is ordered, batches are a function of that order: processors may reorder
        # messages within a chunk.
        ordered = all(manifest.lease["state"].get("ordered") for manifest in manifests)
        self._disorder = max(LEAST_DISORDER, 4 * demand_of(pipeline)) if ordered else 0

    def make(self, again: list[int]) -> BatchPlan:
        """Writes the data files and the plan.

        :param again: Indexes of the sources whose messages are marked as redelivered.
        """
        files, options = self._run.files, self._options
        sources = [manifest.files.get(self._batcher, []) for manifest in self._manifests]
        as_bytes = (
            options.schema is None
            and options.engine == "spark"
            and only_bytes(files, [path for source in sources for path in source])
        )
        batching = Batching(
            self._pipeline, self._batcher, [manifest.generation for manifest in self._manifests]
        )
        data = DataFiles(files, self._path, options, self._pipeline.producer, as_bytes=as_bytes)
        with tempfile.SpooledTemporaryFile(max_size=_LINES_IN_MEMORY) as file:
            lines = _Lines(file)
            try:
                for table in merged(files, sources, disorder=self._disorder):
                    marked = _mark_redelivered(table, again)
                    self._messages += marked.num_rows
                    if data.add(marked, batching.add(marked)):
                        _flush(data, batching, lines)
                batching.finish()
                _flush(data, batching, lines)
                data.close()
            finally:
                data.abort()
            plan = self._header(data.names, lines, as_bytes=as_bytes)
            files.create_own(f"{self._path}/plan.jsonl", lines.below(plan))
        return plan

    def _header(self, names: list[str], lines: _Lines, *, as_bytes: bool) -> BatchPlan:
        expected = sum(manifest.batchers.get(self._batcher, 0) for manifest in self._manifests)
        if self._messages != expected:
            raise StagingError(
                f"batcher {self._batcher!r}: the manifests name"
                f" {pluralize(expected, 'message')}, but their files hold {self._messages}; files"
                f" under {self._run.store.uri}/{self._run.path} are"
                " damaged or missing: clear the process task"
            )
        return BatchPlan(
            path=self._path,
            pipeline=self._pipeline.name,
            batcher=self._batcher,
            generations=[manifest.generation for manifest in self._manifests],
            data=names,
            schema=self._options.schema,
            as_bytes=as_bytes,
            messages=self._messages,
            batches=lines.summing.lines,
            triggers=dict(sorted(lines.triggers.items())),
            root_id=self._run.store.root_id(),
            host=host_name(),
            sink=self._options.commits_uri,
            notes=self._notes(lines.summing.lines),
            lines=lines.summing.to_json(),
        )

    def _notes(self, batches: int) -> list[str]:
        if self._options.engine != "spark" or batches <= MANY_BATCHES:
            return []
        average = round(self._messages / batches)
        merge = "" if self._options.merge_keys else "set merge_keys=True, choose a coarser key, or "
        note = (
            f"{pluralize(batches, 'Spark batch')} of {pluralize(average, 'message')} each are more"
            f" than {MANY_BATCHES:,}, and every one costs a call of handle_batch: {merge}raise"
            " batch_size, batch_bytes or batch_timeout"
        )
        return [note]


class _Lines:
    """The lines of a plan, one per batch, buffered until its header can be written before them.

    :param file: The buffer.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.triggers: Counter[str] = Counter()
        self.summing = Summing()
        self._file = file

    def add(self, batch: PlannedBatch) -> None:
        raw = batch.dumps().encode("utf-8") + b"\n"
        self._file.write(raw)
        self.summing.add(raw)
        self.triggers[batch.trigger] += 1

    def below(self, plan: BatchPlan) -> Iterator[bytes]:
        """Yields the content of the plan's file: its header, then the lines."""
        yield plan.dumps().encode("utf-8") + b"\n"
        self._file.seek(0)
        while block := self._file.read(1024 * 1024):
            yield block


def _flush(data: DataFiles, batching: Batching, lines: _Lines) -> None:
    """Writes the buffered rows, then the lines of the batches that are now complete."""
    batching.note_file(*data.flush())
    for batch in batching.closed():
        lines.add(batch)


def _mark_redelivered(table: pa.Table, sources: list[int]) -> pa.Table:
    """Marks all messages of these sources as redelivered.

    When one of several process tasks is cleared, the messages of the others are batched again,
    together with those that it receives now.
    """
    if not sources:
        return table
    again: Any = pc.is_in(table[SOURCE], value_set=array_of(sources, table[SOURCE].type))
    place = table.column_names.index("redelivered")
    marks = pc.or_(table["redelivered"], again)
    return table.set_column(place, table.schema.field(place), marks)
