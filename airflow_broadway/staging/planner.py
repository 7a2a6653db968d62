"""The plan of a batcher: which messages of a run make up which batch.

A pure function of what the generations published: the messages are streamed in order through
:class:`airflow_broadway.core.stages.batcher.BatcherStage`, whose clock is the instant at which each
was received.  The same input gives the same batches and the same ``batch_id``s, on any machine and
at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import tempfile
import uuid
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.model.options import Batcher
from airflow_broadway.core.schema.plain import load_key
from airflow_broadway.core.stages.batcher import BatcherStage, BatchHash, Closed, KeyMerger
from airflow_broadway.core.text import many
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.batch_reader import messages_of
from airflow_broadway.staging.merge_generations import AT, SOURCE, merged, only_bytes
from airflow_broadway.staging.plan_choice import planned_elsewhere, standing_plan
from airflow_broadway.staging.plan_data_files import DataFiles
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import host_name

if TYPE_CHECKING:
    from airflow_broadway.core.model.pipeline import Pipeline

__all__ = ["MANY_BATCHES", "plan_batches"]

log = logging.getLogger(__name__)

#: Spark batches of one batcher in one run beyond which a plan says so.
MANY_BATCHES = 1000


def plan_batches(
    run: StagedRun,
    pipeline: Pipeline,
    batcher: str,
    generations: Sequence[str],
    *,
    try_label: str,
) -> BatchPlan:
    """Plan the batches of one batcher from what ``generations`` published, and write them down.

    Generations that were given back, or never published, are left out, with a line in the log.  A
    plan of the same generations that is there stands, whatever has become of the options: a killed
    callback may have written what bears its batches' ids.

    :param generations: In any order that is the same for a rebuild.
    :param try_label: Who plans, for people: e.g. ``"2"``; a part of the folder's name.
    :returns: The plan's header, with ``notes`` for people where there is something to say.
    :raises StagingError: If files cannot be read or written, or lie under another root.
    """
    manifests = _valid(run, batcher, generations)
    inputs = hashlib.sha256("\n".join(each.generation for each in manifests).encode()).hexdigest()
    folder = f"batches/{batcher}/{inputs[:16]}"
    standing = standing_plan(run, folder)
    if standing is not None:
        log.info(
            "batcher %r: the plan %s stands; %d of its %s have an outcome",
            batcher,
            standing[1].path,
            standing[0],
            many(standing[1].batches, "batch"),
        )
        return standing[1]
    # By name, the newest is last.
    stamp = run.clock.now().astimezone(UTC).strftime("%Y%m%dT%H%M%S%f")
    label = re.sub(r"[^A-Za-z0-9-]+", "-", try_label)[:40] or "try"
    path = f"{folder}/{stamp}-{label}-{uuid.uuid4().hex[:8]}"
    seen = planned_elsewhere(run, batcher, inputs[:16])
    plan = _Planning(run, pipeline, batcher, manifests, path, seen).run()
    for note in plan.notes:
        log.warning("batcher %r: %s", batcher, note)
    return plan


def _valid(run: StagedRun, batcher: str, generations: Sequence[str]) -> list[Manifest]:
    found: list[Manifest] = []
    for generation in dict.fromkeys(generations):
        record = run.generation(generation)
        if not record.published:
            log.info(
                "batcher %r: generation %s is left out, for it is %s",
                batcher,
                generation,
                "not published" if record.state == "open" else "settled or given back",
            )
            continue
        manifest = run.manifest(generation)
        if manifest is not None:
            found.append(manifest)
    return found


class _Row(NamedTuple):
    """What batching needs of a message: an :class:`airflow_broadway.core.stages.batcher.Item`."""

    batch_key: str
    batch_mode: BatchMode
    size: int
    partition: int | None
    message_id: str
    redelivered: bool
    source: int
    place: int


class _Pending:
    """A batch being filled: a running hash and counts, never its messages."""

    __slots__ = ("_planning", "bytes", "files", "hash", "ids", "number", "redelivered", "sources")

    def __init__(self, planning: _Planning, number: int, key: str) -> None:
        self._planning = planning
        self.number = number
        self.hash: BatchHash | str = planning.hash_of(load_key(json.loads(key)))
        self.ids: list[str] = []
        self.bytes = 0
        self.redelivered = 0
        self.sources = planning.no_sources[:]
        self.files = 0  # a bit for each data file

    def append(self, row: _Row) -> None:
        ids = self.ids
        planning = self._planning
        if not ids:
            planning.touched.append(self)
        ids.append(row.message_id)
        planning.column[row.place] = self.number
        self.bytes += row.size
        self.redelivered += row.redelivered
        self.sources[row.source] += 1

    def absorb(self) -> None:
        """Put the ids seen so far into the hash."""
        if self.ids and isinstance(self.hash, BatchHash):
            self.hash.update_all(self.ids)
        self.ids = []

    def close(self) -> str:
        """The batch's id."""
        self.absorb()
        if isinstance(self.hash, BatchHash):
            self.hash = self.hash.hexdigest()
        return self.hash


class _Planning:
    """One making of a plan."""

    def __init__(
        self,
        run: StagedRun,
        pipeline: Pipeline,
        batcher: str,
        manifests: list[Manifest],
        path: str,
        seen: Collection[str],
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._batcher = batcher
        self._path = path
        self._options: Batcher = pipeline.batchers[batcher]
        self._manifests = manifests
        self._sources = [each.files.get(batcher, []) for each in manifests]
        self.no_sources = [0] * len(manifests)
        #: Sources whose messages may have been handled in batches of another plan.
        self._seen = [i for i, each in enumerate(manifests) if each.generation in seen]
        #: The batch of each row of the table at hand, and the batches that have rows of it.
        self.column: list[int] = []
        self.touched: list[_Pending] = []
        self._pending: dict[int, _Pending] = {}
        self._opened = 0
        self._messages: list[Message] = []
        self._stage = self._make_stage()
        self._merger: KeyMerger | None = None
        if self._options.merge_keys:
            self._merger = KeyMerger(self._options.batch_size, self._options.batch_bytes)
        #: Batches that are closed, and whose rows are not all written yet.
        self._waiting: list[list[Closed]] = []
        self._triggers: Counter[str] = Counter()
        self._batches = 0
        self._summing = Summing()
        self._count = 0

    def hash_of(self, key: Any) -> BatchHash:
        """A new batch's running hash."""
        return BatchHash(self._pipeline.name, self._batcher, key)

    def _make_stage(self) -> BatcherStage:
        options = self._options
        if isinstance(options.batch_size, tuple):
            initial, splitter = options.batch_size

            def split(row: _Row, acc: Any) -> Any:
                return splitter(self._messages[row.place], acc)

            options = dataclasses.replace(options, batch_size=(initial, split))
        partition = None if options.partition_by is None else lambda row: row.partition
        return BatcherStage(self._batcher, options, make=self._make, partition=partition)

    def _make(self, key: str, partition: int | None) -> _Pending:
        pending = _Pending(self, self._opened, key)
        self._pending[self._opened] = pending
        self._opened += 1
        return pending

    # ----------------------------------------------------------------------------------------------

    def run(self) -> BatchPlan:
        files, options = self._run.files, self._options
        paths = [path for source in self._sources for path in source]
        sparkish = options.schema is None and options.engine == "spark"
        as_bytes = sparkish and only_bytes(files, paths)
        data = DataFiles(files, self._path, options, self._pipeline.producer, as_bytes=as_bytes)
        with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as lines:
            try:
                for table in map(self._marked, merged(files, self._sources)) if paths else ():
                    self._take(table)
                    if data.add(table, self.column):
                        self._flush(data, lines)
                self._close(self._stage.flush())
                if self._merger is not None:
                    self._waiting += self._merger.flush()
                self._flush(data, lines)
                data.close()
            finally:
                data.abort()
            plan = self._header(data.names, as_bytes)
            files.create_own(f"{self._path}/plan.jsonl", _whole(plan, lines))
        return plan

    def _marked(self, table: pa.Table) -> pa.Table:
        """The table with what may have been handled before marked as redelivered.

        When one of several process tasks is cleared, the messages of the others stay, and are
        batched anew beside those that it receives now.
        """
        if not self._seen:
            return table
        again: Any = pc.is_in(table[SOURCE], value_set=array_of(self._seen, table[SOURCE].type))
        place = table.column_names.index("redelivered")
        marks = pc.or_(table["redelivered"], again)
        return table.set_column(place, table.schema.field(place), marks)

    def _take(self, table: pa.Table) -> None:
        """Batch the rows of one table."""
        count = table.num_rows
        self._count += count
        self.column = [-1] * count
        rows = _rows(table)
        if self._messages or isinstance(self._options.batch_size, tuple):
            self._messages = messages_of(
                table, self._options.schema, self._batcher, python=self._options.engine == "python"
            )
        stage, timed = self._stage, self._options.batch_timeout is not None
        if not timed and not pc.any(table["flush"]).as_py():
            # Without flushes and timeouts it makes no difference how messages arrived in chunks.
            self._close(stage.add(rows, 0.0))
        else:
            for start, stop, now in _chunks(table):
                if timed:
                    self._close(stage.due(now))
                self._close(stage.add(rows[start:stop], now))
        for pending in self.touched:
            pending.absorb()
        self.touched.clear()

    def _close(self, closed: list[Closed]) -> None:
        if not closed:
            return
        for batch in closed:
            batch.pending.close()
        if self._merger is None:
            self._waiting += [[batch] for batch in closed]
        else:
            sized = [batch._replace(bytes=batch.pending.bytes) for batch in closed]
            self._waiting += self._merger.add(sized)

    def _flush(self, data: DataFiles, lines: Any) -> None:
        """Write the slab, then the lines of the batches that are now wholly written."""
        file, numbers = data.flush()
        bit = 1 << file
        for number in numbers:
            self._pending[number].files |= bit
        for call in self._waiting:
            planned = self._planned(call)
            raw = planned.dumps().encode("utf-8") + b"\n"
            lines.write(raw)
            self._summing.add(raw)
            self._batches += 1
            self._triggers[planned.trigger] += 1
        self._waiting.clear()

    def _planned(self, call: list[Closed]) -> PlannedBatch:
        """The line of one batch, which is many closed ones where keys are merged."""
        pendings: list[_Pending] = [batch.pending for batch in call]
        first = call[0]
        for pending in pendings:
            del self._pending[pending.number]
        files, sources = 0, self.no_sources[:]
        for pending in pendings:
            files |= pending.files
            sources = [a + b for a, b in zip(sources, pending.sources, strict=True)]
        if self._merger is None:
            batch_id, key, keys = pendings[0].close(), json.loads(first.key), 1
        else:
            # A hash of hashes: the ids of the batches stand for the ids of their messages.
            batch_id = self.hash_of(None).update_all(each.close() for each in pendings).hexdigest()
            key, keys = None, len({batch.key for batch in call})
        return PlannedBatch(
            batch_id=batch_id,
            rows=_ranges(array("q", sorted(each.number for each in pendings))),
            files=[index for index in range(files.bit_length()) if files >> index & 1],
            batch_key=key,
            keys=keys,
            partition=first.partition,
            size=sum(batch.size for batch in call),
            bytes=sum(each.bytes for each in pendings),
            trigger=max(call, key=lambda batch: batch.size).trigger.value,
            redelivered=sum(each.redelivered for each in pendings),
            sources={
                manifest.generation: count
                for manifest, count in zip(self._manifests, sources, strict=True)
                if count
            },
        )

    def _header(self, names: list[str], as_bytes: bool) -> BatchPlan:
        expected = sum(each.batchers.get(self._batcher, 0) for each in self._manifests)
        if self._count != expected:
            raise StagingError(
                f"batcher {self._batcher!r}: the manifests name"
                f" {many(expected, 'message')}, but their files hold {self._count}; files under"
                f" {self._run.store.uri}/{self._run.path} are"
                " damaged or missing: clear the process task"
            )
        return BatchPlan(
            path=self._path,
            pipeline=self._pipeline.name,
            batcher=self._batcher,
            generations=[each.generation for each in self._manifests],
            data=names,
            schema=self._options.schema,
            as_bytes=as_bytes,
            messages=self._count,
            batches=self._batches,
            triggers=dict(sorted(self._triggers.items())),
            root_id=self._run.store.root_id(),
            host=host_name(),
            notes=self._notes(),
            lines=self._summing.to_json(),
        )

    def _notes(self) -> list[str]:
        if self._options.engine != "spark" or self._batches <= MANY_BATCHES:
            return []
        each = round(self._count / self._batches)
        merge = "" if self._options.merge_keys else "set merge_keys=True, choose a coarser key, or "
        note = (
            f"{many(self._batches, 'Spark batch')} of {many(each, 'message')} each are more than"
            f" {MANY_BATCHES:,}, and every one costs a call of handle_batch: {merge}raise"
            " batch_size, batch_bytes or batch_timeout"
        )
        return [note]


def _rows(table: pa.Table) -> list[_Row]:
    flush = table["flush"]
    count = table.num_rows
    bulk, at_once = BatchMode.BULK, BatchMode.FLUSH
    modes: Any = [bulk] * count
    if pc.any(flush).as_py():
        modes = [at_once if each else bulk for each in flush.to_pylist()]
    columns = zip(
        table["batch_key"].to_pylist(),
        modes,
        table["size"].to_pylist(),
        table["partition"].to_pylist(),
        table["message_id"].to_pylist(),
        table["redelivered"].to_pylist(),
        table[SOURCE].to_pylist(),
        range(count),
        strict=True,
    )
    return [_Row._make(each) for each in columns]


def _chunks(table: pa.Table) -> Iterator[tuple[int, int, float]]:
    """Where each chunk of the table begins and ends, and the instant at which it came."""
    span = 1 << 40
    both: Any = pc.add(pc.multiply(table[SOURCE].cast(pa.int64()), span), table["chunk"])
    start = 0
    for stop in pc.run_end_encode(both.combine_chunks()).run_ends.to_pylist():
        yield start, stop, table[AT][start].as_py() / 1e6
        start = stop


def _ranges(numbers: array[int]) -> list[list[int]]:
    """Sorted numbers as inclusive ranges."""
    made: list[list[int]] = []
    for number in numbers:
        if made and made[-1][1] == number - 1:
            made[-1][1] = number
        else:
            made.append([number, number])
    return made


def _whole(plan: BatchPlan, lines: Any) -> Iterator[bytes]:
    """The plan's file: the header, then the lines written so far."""
    yield plan.dumps().encode("utf-8") + b"\n"
    lines.seek(0)
    while block := lines.read(1024 * 1024):
        yield block
