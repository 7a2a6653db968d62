"""What is recorded of one generation's messages: manifest, plans, outcomes and entries together."""

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
    """Where the exceptions of one batch lie: a file of entries, or the outcome itself.

    :param sum: What the file should add up to.
    :param source: The index of the generation in the plan.
    :param shared: Whether the batch holds messages of other generations too.
    """

    path: str
    sum: Mapping[str, Any] | None
    source: int
    shared: bool


@dataclass(slots=True)
class _Batches:
    """Some batches of one plan that have messages of the generation.

    :param source: The index of the generation in the plan.
    :param ranges: The numbers of the batches, sorted, as inclusive ranges.
    :param parts: Those of batches that were split.
    :param files: Indexes of the data files that hold their rows.
    :param count: Messages of the generation in them.
    """

    plan: BatchPlan
    source: int
    ranges: list[list[int]] = field(default_factory=list)
    parts: list[PlannedBatch] = field(default_factory=list)
    files: set[int] = field(default_factory=set)
    count: int = 0

    def add(self, planned: PlannedBatch) -> None:
        """Take in another."""
        self.count += planned.sources[self.plan.generations[self.source]]
        if planned.part is None:
            self.ranges.extend(planned.rows)
        else:
            self.parts.append(planned)
        self.files.update(planned.files)

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of the generation is in one of them."""
        number = row["batch"]
        if holds(self.ranges, number, number):
            return True
        return any(
            holds(part.rows, number, number) and part.has(row["source"], row["position"])
            for part in self.parts
        )


class HeldMessages:
    """The messages of one published generation, and what is recorded of them by now.

    Memory holds the ids of exceptions at most.

    :param plans: The plans that decide about the generation, one for each batcher at most.
    :raises StagingDamaged: If a file that says what becomes of messages is not as it was written,
        or counts do not agree.
    """

    def __init__(
        self, recorded: Recorded, manifest: Manifest, producer: Producer, plans: list[BatchPlan]
    ) -> None:
        self._recorded = recorded
        self._run = recorded.run
        self._manifest = manifest
        self._producer = producer
        #: Whether every success that has no entry is simply acked.
        self.plain = producer.actions[producer.on_success] is Action.ACK and not manifest.configured
        #: Messages staged for batchers; of these, those in batches with an outcome.
        self.staged = sum(manifest.batchers.values())
        self.decided = 0
        #: Batches that hold messages of the generation; of these, those with an outcome.
        self._batches = self._recorded_batches = 0
        self._exceptions: list[_Exceptions] = []
        #: Those with an outcome.
        self._decided: list[_Batches] = []
        by_batcher = {
            plan.batcher: plan for plan in plans if manifest.generation in plan.generations
        }
        #: Batchers that have messages of the generation, but no plan.
        self.unplanned = [
            name for name, count in manifest.batchers.items() if count and name not in by_batcher
        ]
        for plan in by_batcher.values():
            self._read(plan)
        self._verify()
        #: What callbacks settled at once, in processors and batches.
        self.settled_now = SettleReport.from_json(manifest.settled_now) + self._settled_in_batches()

    def progress(self) -> Progress:
        """How far the generation has come."""
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
        """Read each file of entries once, before any verdict in it is carried out.

        A lost line would turn a failure into an ack.

        :raises StagingDamaged: If one is not as it was written, or what was received is not the sum
            of what was staged and of the lines.
        """
        manifest, recorded = self._manifest, self._recorded
        sums = {path: manifest.sums.get(path) for path in manifest.entries}
        recorded.keep({**sums, **{each.path: each.sum for each in self._exceptions}})
        lines = sum(recorded.verify(path, total) for path, total in sums.items())
        for each in self._exceptions:
            recorded.verify(each.path, each.sum)
        if self.staged + lines != manifest.received:
            raise StagingDamaged(
                f"generation {manifest.generation} received {many(manifest.received, 'message')},"
                f" and {self.staged} staged ones and {many(lines, 'line')} of entries are there"
            )

    def _read(self, plan: BatchPlan) -> None:
        """Take in which of a plan's batches have an outcome."""
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

    def _before_batches(self) -> Iterator[EntryLine]:
        """The entries of the process task."""
        for path in self._manifest.entries:
            yield from self._recorded.entries(path, self._manifest.sums.get(path))

    def _in_batches(self) -> Iterator[EntryLine]:
        """The entries of batches, of this generation only."""
        unsure = self._unsure()
        for found in self._exceptions:
            for line in self._recorded.entries(found.path, found.sum):
                if line.source is None:
                    if not found.shared or line.entry.message_id in unsure:
                        yield line
                elif line.source == found.source:
                    yield line

    def _unsure(self) -> set[str]:
        """The ids of this generation among entries of shared batches that name no source."""
        ids = {
            line.entry.message_id
            for found in self._exceptions
            if found.shared
            for line in self._recorded.entries(found.path, found.sum)
            if line.source is None
        }
        if not ids:
            return ids
        return {row["message_id"] for row in self._rows(["message_id"]) if row["message_id"] in ids}

    def _settled_in_batches(self) -> SettleReport:
        counts: Counter[str] = Counter()
        for line in self._in_batches():
            if line.settled:
                counts[CLASS_OF[line.entry.verdict.action]] += 1
        return SettleReport.from_json(dict(counts))

    # -- streams -------------------------------------------------------------------------------

    def entries(self, *, all_rows: bool) -> Iterator[Entry]:
        """The messages with verdicts of their own.

        :param all_rows: Also those in batches with an outcome that succeeded: nothing is left then
            but messages without an outcome.
        """
        for line in self._before_batches():
            if not line.settled:
                yield line.entry
        exceptions: set[str] = set()
        for line in self._in_batches():
            if all_rows:
                exceptions.add(line.entry.message_id)
            if not line.settled:
                yield line.entry
        if all_rows:
            for decided in self._decided:
                yield from self._successes(decided, exceptions)

    def everything(self, rest: Verdict) -> Iterator[Entry]:
        """All messages that nobody has settled at once.

        :param rest: The verdict on those that are staged for batchers.
        """
        for line in self._before_batches():
            if not line.settled:
                yield line.entry
        settled = {line.entry.message_id for line in self._in_batches() if line.settled}
        columns = ["message_id", "_receipt", "attempt", "_acked", *self._payload_columns()]
        for row in self._rows(columns):
            if not row["_acked"] and row["message_id"] not in settled:
                yield _entry(row, rest)

    def _payload_columns(self) -> list[str]:
        return ["_payload", "_properties"] if self._producer.keeps_payload else []

    def _rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """The staged messages of the generation, in order of file.

        :raises StagingDamaged: If a file is not there, or they are not as many as were staged.
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
                    f"{many(expected, 'message')} staged for the batcher {batcher!r}, and its files"
                    f" of generation {self._manifest.generation} hold {count}"
                )

    def _open(self, path: str) -> ParquetFile:
        try:
            return ParquetFile(self._run.files, path)
        except FileNotFoundError:
            raise StagingDamaged(f"{path} is not there") from None

    def _successes(self, decided: _Batches, exceptions: set[str]) -> Iterator[Entry]:
        """The messages of decided batches that have no entry, each with its own verdict."""
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
        """The rows of the generation in batches.

        :raises StagingDamaged: At their end, if they are more or fewer than the plan says.
        """
        plan, count = batches.plan, 0
        batches.ranges.sort()
        wanted = sorted([*batches.ranges, *(r for part in batches.parts for r in part.rows)])
        columns = ["batch", "source", "position", *columns]
        for index in sorted(batches.files):
            with self._open(f"{plan.path}/{plan.data[index]}") as file:
                for group in range(file.groups):
                    if not holds(wanted, *file.bounds(group, "batch")):
                        continue
                    for row in file.read(group, columns).to_pylist():
                        if row["source"] == batches.source and batches.holds(row):
                            count += 1
                            yield row
        if count != batches.count:
            raise StagingDamaged(
                f"batches of {plan.path} hold {many(batches.count, 'message')} of generation"
                f" {self._manifest.generation}, and its files hold {count}"
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
