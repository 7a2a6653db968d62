"""Combines manifest, plans, outcomes and entries of one generation's messages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.report import CLASS_OF, SettleReport
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.entries import EntryLine
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.text import many
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.settling.journal import Progress
from airflow_broadway.staging.tables import ParquetFile, holds

log = logging.getLogger(__name__)


class _Exceptions(NamedTuple):
    """The location of the exceptions of one batch: an entry file, or the outcome itself.

    :param sum: The expected checksum of the file.
    :param source: The index of the generation in the plan.
    :param shared: Whether the batch also has messages of other generations.
    """

    path: str
    sum: Mapping[str, Any] | None
    source: int
    shared: bool


@dataclass(slots=True)
class _Batches:
    """Batches of one plan with messages of the generation.

    :param source: The index of the generation in the plan.
    :param ranges: The numbers of the batches, sorted, as inclusive ranges.
    :param parts: The parts of split batches.
    :param files: Indexes of the data files that hold their rows.
    :param count: Number of messages of the generation in them.
    """

    plan: BatchPlan
    source: int
    ranges: list[list[int]] = field(default_factory=list)
    parts: list[PlannedBatch] = field(default_factory=list)
    files: set[int] = field(default_factory=set)
    count: int = 0

    def add(self, planned: PlannedBatch) -> None:
        """Adds a batch."""
        self.count += planned.sources[self.plan.generations[self.source]]
        if planned.part is None:
            self.ranges.extend(planned.rows)
        else:
            self.parts.append(planned)
        self.files.update(planned.files)

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of the generation is in one of the batches."""
        number = row["batch"]
        if holds(self.ranges, number, number):
            return True
        return any(
            holds(part.rows, number, number) and part.has(row["source"], row["position"])
            for part in self.parts
        )


class HeldMessages:
    """The messages of one published generation with their recorded outcomes.

    Memory holds at most the ids of exceptions.

    :param plans: The plans that decide about the generation, at most one per batcher.
    :raises StagingDamaged: If a file with verdicts is damaged, or counts do not agree.
    """

    def __init__(
        self, recorded: Recorded, manifest: Manifest, producer: Producer, plans: list[BatchPlan]
    ) -> None:
        self._recorded = recorded
        self._run = recorded.run
        self._manifest = manifest
        self._producer = producer
        #: Whether every success without an entry is simply acked.
        self.plain = producer.actions[producer.on_success] is Action.ACK and not manifest.configured
        #: Number of messages staged for batchers; of these, in batches with an outcome.
        self.staged = sum(manifest.batchers.values())
        self.decided = 0
        #: Number of batches with messages of the generation; of these, with an outcome.
        self._batches = self._recorded_batches = 0
        self._exceptions: list[_Exceptions] = []
        #: The batches with an outcome.
        self._decided: list[_Batches] = []
        by_batcher = {
            plan.batcher: plan for plan in plans if manifest.generation in plan.generations
        }
        #: Batchers with messages of the generation but without a plan.
        self.unplanned = [
            name for name, count in manifest.batchers.items() if count and name not in by_batcher
        ]
        for plan in by_batcher.values():
            self._read(plan)
        self._verify()
        #: Messages settled immediately by callbacks, in processors and batches.
        self.settled_now = SettleReport.from_json(manifest.settled_now) + self._settled_in_batches()

    def progress(self) -> Progress:
        """Returns the progress of the generation."""
        return Progress(
            received=self._manifest.received,
            staged=self.staged,
            decided=self.decided,
            batches=self._batches,
            recorded=self._recorded_batches,
            unplanned=tuple(self.unplanned),
            settled_now=self.settled_now,
        )

    def _verify(self) -> None:
        """Reads each entry file once before any verdict in it is executed.

        A lost line would turn a failure into an ack.

        :raises StagingDamaged: If a file is damaged, or the number of received messages is not the
            sum of staged messages and lines.
        """
        manifest, recorded = self._manifest, self._recorded
        sums = {path: manifest.sums.get(path) for path in manifest.entries}
        recorded.keep({**sums, **{file.path: file.sum for file in self._exceptions}})
        lines = sum(recorded.verify(path, total) for path, total in sums.items())
        for file in self._exceptions:
            recorded.verify(file.path, file.sum)
        if self.staged + lines != manifest.received:
            raise StagingDamaged(
                f"generation {manifest.generation} received {many(manifest.received, 'message')},"
                f" but has {self.staged} staged ones and {many(lines, 'line')} of entries"
            )

    def _read(self, plan: BatchPlan) -> None:
        """Collects the batches of a plan that have an outcome."""
        self._run.store.check_root(plan.root_id, plan.host)
        generation = self._manifest.generation
        source = plan.generations.index(generation)
        decided = _Batches(plan, source)
        for planned, outcome in self._recorded.outcomes(plan):
            if not planned.sources.get(generation, 0):
                continue
            self._batches += 1
            if outcome is None:
                continue
            self._recorded_batches += 1
            decided.add(planned)
            if outcome.exceptions is not None:
                shared = len(planned.sources) > 1
                self._exceptions.append(
                    _Exceptions(outcome.exceptions, outcome.entries_sum, source, shared)
                )
        self.decided += decided.count
        if decided.count:
            self._decided.append(decided)

    # -- exceptions ----------------------------------------------------------------------------

    def _process_entries(self) -> Iterator[EntryLine]:
        """Yields the entries of the process task."""
        for path in self._manifest.entries:
            yield from self._recorded.entries(path, self._manifest.sums.get(path))

    def _batch_entries(self) -> Iterator[EntryLine]:
        """Yields the entries of batches, of this generation only."""
        unsure = self._ambiguous_ids()
        for exceptions in self._exceptions:
            for line in self._recorded.entries(exceptions.path, exceptions.sum):
                if line.source is None:
                    if not exceptions.shared or line.entry.message_id in unsure:
                        yield line
                elif line.source == exceptions.source:
                    yield line

    def _ambiguous_ids(self) -> set[str]:
        """Returns the ids of this generation among entries of shared batches without a source."""
        ids = {
            line.entry.message_id
            for exceptions in self._exceptions
            if exceptions.shared
            for line in self._recorded.entries(exceptions.path, exceptions.sum)
            if line.source is None
        }
        if not ids:
            return ids
        return {row["message_id"] for row in self._rows(["message_id"]) if row["message_id"] in ids}

    def _settled_in_batches(self) -> SettleReport:
        counts: Counter[str] = Counter()
        for line in self._batch_entries():
            if line.settled:
                counts[CLASS_OF[line.entry.verdict.action]] += 1
        return SettleReport.from_json(dict(counts))

    # -- streams -------------------------------------------------------------------------------

    def entries(self, *, all_rows: bool) -> Iterator[Entry]:
        """Yields the messages with explicit verdicts.

        :param all_rows: Whether to include successes of batches with an outcome; the rest are then
            only messages without an outcome.
        """
        for line in self._process_entries():
            if not line.settled:
                yield line.entry
        exceptions: set[str] = set()
        for line in self._batch_entries():
            if all_rows:
                exceptions.add(line.entry.message_id)
            if not line.settled:
                yield line.entry
        if all_rows:
            for decided in self._decided:
                yield from self._successes(decided, exceptions)

    def everything(self, rest: Verdict) -> Iterator[Entry]:
        """Yields all messages that were not settled immediately.

        :param rest: The verdict for messages staged for batchers.
        """
        for line in self._process_entries():
            if not line.settled:
                yield line.entry
        settled = {line.entry.message_id for line in self._batch_entries() if line.settled}
        columns = ["message_id", "_receipt", "attempt", "_acked", *self._payload_columns()]
        for row in self._rows(columns):
            if not row["_acked"] and row["message_id"] not in settled:
                yield _entry(row, rest)

    def _payload_columns(self) -> list[str]:
        return ["_payload", "_properties"] if self._producer.keeps_payload else []

    def _rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yields the staged messages of the generation, in order of file.

        :raises StagingDamaged: If a file is missing, or their number differs from the manifest.
        """
        for batcher, files in self._manifest.files.items():
            count = 0
            for path in files:
                with self._open(path) as file:
                    for group in range(file.groups):
                        rows = file.read(group, columns).to_pylist()
                        count += len(rows)
                        yield from rows
            expected = self._manifest.batchers[batcher]
            if count != expected:
                raise StagingDamaged(
                    f"{many(expected, 'message')} staged for the batcher {batcher!r}, but its files"
                    f" of generation {self._manifest.generation} hold {count}"
                )

    def _open(self, path: str) -> ParquetFile:
        try:
            return ParquetFile(self._run.files, path)
        except FileNotFoundError:
            raise StagingDamaged(f"{path} is not there") from None

    def _successes(self, decided: _Batches, exceptions: set[str]) -> Iterator[Entry]:
        """Yields the messages of decided batches without an entry, each with its verdict."""
        producer = self._producer
        columns = ["message_id", "attempt", "redelivered", "_receipt", "_on_success", "_acked"]
        for row in self._rows_in(decided, [*columns, *self._payload_columns()]):
            if row["_acked"] or row["message_id"] in exceptions:
                continue
            facts = Facts(
                row["_on_success"] or producer.on_success,
                row["attempt"],
                row["redelivered"],
                stage="batch",
                message_id=row["message_id"],
            )
            yield _entry(row, producer.judge(facts))

    def _rows_in(self, batches: _Batches, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields the rows of the generation in batches.

        :raises StagingDamaged: At the end, if their number differs from the plan.
        """
        plan, count = batches.plan, 0
        batches.ranges.sort()
        ranges = sorted([*batches.ranges, *(r for part in batches.parts for r in part.rows)])
        columns = ["batch", "source", "position", *columns]
        for index in sorted(batches.files):
            with self._open(f"{plan.path}/{plan.data[index]}") as file:
                for group in range(file.groups):
                    if not holds(ranges, *file.bounds(group, "batch")):
                        continue
                    for row in file.read(group, columns).to_pylist():
                        if row["source"] == batches.source and batches.holds(row):
                            count += 1
                            yield row
        if count != batches.count:
            raise StagingDamaged(
                f"batches of {plan.path} hold {many(batches.count, 'message')} of generation"
                f" {self._manifest.generation}, but its files hold {count}"
            )


def _entry(row: dict[str, Any], verdict: Verdict) -> Entry:
    return Entry(
        row["message_id"],
        row["_receipt"],
        verdict,
        row["attempt"],
        row.get("_payload"),
        row.get("_properties"),
    )
