"""From recorded outcomes to what is settled at the broker, and the journal of doing so.

:func:`build_settlement` reads manifests, plans and outcomes and says what becomes of each message
of one generation; :func:`settle_generation` carries it out between two journal files.  Both may be
run again at any time, by several processes at once: outcomes are only ever added, the custodian is
idempotent, and the first report written stands.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import (
    ACK,
    RELEASE,
    Action,
    Custodian,
    Entry,
    Settlement,
    SettleReport,
    Verdict,
)
from airflow_broadway.core.custody.verdicts import COUNTED, Facts
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.entries import EntryLine
from airflow_broadway.core.formats.layout import VERSION, paths
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.text import many
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settlement_journal import Progress, record_settled, settled_journal
from airflow_broadway.staging.store import host_name
from airflow_broadway.staging.tables import ParquetFile

if TYPE_CHECKING:
    from airflow_broadway.core.model.pipeline import Pipeline

__all__ = ["build_settlement", "settle_generation"]

log = logging.getLogger(__name__)


class _Exceptions(NamedTuple):
    """A file of entries of one outcome, or the outcome itself."""

    path: str
    sum: Mapping[str, Any] | None
    source: int
    shared: bool  # whether the batch holds messages of other generations too


@dataclass(slots=True)
class _Decided:
    """The batches of one plan that have an outcome and messages of the generation."""

    plan: BatchPlan
    source: int
    ranges: list[list[int]] = field(default_factory=list)
    files: set[int] = field(default_factory=set)
    count: int = 0  # messages of the generation in them


def build_settlement(
    run: StagedRun,
    generation: str,
    pipeline: Pipeline,
    plans: Sequence[BatchPlan] | None,
    *,
    final: bool,
    recorded: Recorded | None = None,
) -> tuple[Settlement, bool, Progress]:
    """Say what becomes of each message of one generation, by what is recorded now.

    :param plans: Those of the run's batchers that hold messages of it; one per batcher.
    :param final: Nothing more will be recorded: say so in the log where something is missing.
    :param recorded: What has been read of the run already.
    :returns: The settlement; whether every message has an outcome (otherwise carrying it out
        releases those that have none); and the counts.
    :raises StagingDamaged: If a file that says what becomes of messages is not as it was written,
        or counts do not agree.
    """
    manifest = run.manifest(generation)
    if manifest is None:
        return Settlement(rest=RELEASE, settled_now=SettleReport()), False, Progress()
    held = _Held(recorded or Recorded(run), manifest, pipeline.producer, list(plans or ()))
    complete = held.decided == held.staged
    if final and not complete:
        log.warning(
            "generation %s: %d of %s given back, without an outcome%s",
            generation,
            held.staged - held.decided,
            many(held.staged, "staged message"),
            f" (no plan for {', '.join(held.unplanned)})" if held.unplanned else "",
        )
    settled_now = SettleReport.from_json(manifest.settled_now) + held.settled_in_batches()
    rest = ACK if complete and held.plain else RELEASE
    settlement = Settlement(
        rest=rest,
        entries=lambda: held.entries(all_rows=rest is RELEASE),
        everything=lambda: held.everything(rest),
        expected=manifest.received - settled_now.total,
        settled_now=settled_now,
    )
    progress = Progress(
        received=manifest.received,
        staged=held.staged,
        decided=held.decided,
        batches=held.batches,
        recorded=held.recorded_batches,
        unplanned=tuple(held.unplanned),
        settled_now=settled_now,
    )
    return settlement, complete, progress


class _Held:
    """What is known of one generation's messages; memory holds the ids of exceptions at most."""

    def __init__(
        self, recorded: Recorded, manifest: Manifest, producer: Producer, plans: list[BatchPlan]
    ) -> None:
        self._recorded = recorded
        self._run = recorded.run
        self._manifest = manifest
        self._producer = producer
        #: Whether every success that has no entry is simply acked.
        self.plain = producer.actions[producer.on_success] is Action.ACK and not manifest.configured
        self.staged = sum(manifest.batchers.values())
        self.decided = self.batches = self.recorded_batches = 0
        self._exceptions: list[_Exceptions] = []
        self._decided: list[_Decided] = []
        by_batcher = {
            plan.batcher: plan for plan in plans if manifest.generation in plan.generations
        }
        self.unplanned = [
            name for name, count in manifest.batchers.items() if count and name not in by_batcher
        ]
        for plan in by_batcher.values():
            self._look(plan)
        self._verify()

    def _verify(self) -> None:
        """Read each file of entries once before any verdict of it is carried out.

        A lost line would make an ack of a failure.

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

    def _look(self, plan: BatchPlan) -> None:
        self._run.store.check_root(plan.root_id, plan.host)
        generation = self._manifest.generation
        source = plan.generations.index(generation)
        decided = _Decided(plan, source)
        for planned, outcome in self._recorded.outcomes(plan):
            count = planned.sources.get(generation, 0)
            if not count:
                continue
            self.batches += 1
            if outcome is None:
                continue
            self.recorded_batches += 1
            decided.count += count
            decided.ranges.extend(planned.rows)
            decided.files.update(planned.files)
            if outcome.exceptions is not None:
                shared = len(planned.sources) > 1
                self._exceptions.append(
                    _Exceptions(outcome.exceptions, outcome.entries_sum, source, shared)
                )
        self.decided += decided.count
        if decided.ranges:
            decided.ranges.sort()
            self._decided.append(decided)

    # -- exceptions ----------------------------------------------------------------------------

    def _before_batches(self) -> Iterator[EntryLine]:
        for path in self._manifest.entries:
            yield from self._recorded.entries(path, self._manifest.sums.get(path))

    def _in_batches(self) -> Iterator[EntryLine]:
        """The exceptions that outcomes name, of this generation only."""
        unsure = self._unsure()
        for found in self._exceptions:
            for line in self._recorded.entries(found.path, found.sum):
                if line.source is None:
                    if not found.shared or line.entry.message_id in unsure:
                        yield line
                elif line.source == found.source:
                    yield line

    def _unsure(self) -> set[str]:
        """Ids in shared batches whose entries name no source, and that are of this generation."""
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

    def settled_in_batches(self) -> SettleReport:
        """What callbacks of batches settled at once."""
        counts: Counter[str] = Counter()
        for line in self._in_batches():
            if line.settled:
                counts[COUNTED[line.entry.verdict.action]] += 1
        return SettleReport.from_json(dict(counts))

    # -- streams -------------------------------------------------------------------------------

    def entries(self, *, all_rows: bool) -> Iterator[Entry]:
        """The messages that do not get ``rest``."""
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
        """All that the lease still holds, as far as it is staged."""
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
        """The staged messages of the generation, in order of file."""
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

    def _successes(self, decided: _Decided, exceptions: set[str]) -> Iterator[Entry]:
        """The plain successes of batches with an outcome, each with its own verdict."""
        producer, plan, count = self._producer, decided.plan, 0
        columns = ["message_id", "batch", "source", "attempt", "redelivered"]
        columns += ["_receipt", "_on_success", "_acked", *self._payload_columns()]
        for index in sorted(decided.files):
            with self._open(f"{plan.path}/{plan.data[index]}") as file:
                for group in range(file.groups):
                    if not _holds(decided.ranges, *file.bounds(group, "batch")):
                        continue
                    for row in file.read(group, columns).to_pylist():
                        if row["source"] != decided.source or not _holds(
                            decided.ranges, row["batch"], row["batch"]
                        ):
                            continue
                        count += 1
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
        if count != decided.count:
            raise StagingDamaged(
                f"the batches of {plan.path} that have an outcome hold"
                f" {many(decided.count, 'message')} of generation {self._manifest.generation}, and"
                f" its files hold {count}"
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


def _holds(ranges: list[list[int]], first: int, last: int) -> bool:
    """Whether one of the sorted ranges has a number from ``first`` to ``last``."""
    low, high = 0, len(ranges)
    while low < high:
        middle = (low + high) // 2
        if ranges[middle][1] < first:
            low = middle + 1
        else:
            high = middle
    return low < len(ranges) and ranges[low][0] <= last


def settle_generation(
    run: StagedRun,
    record: GenerationRecord,
    custodian: Custodian,
    settlement: Settlement,
    *,
    progress: Progress | None = None,
    by: str = "",
) -> SettleReport:
    """Settle one generation at its broker, once.

    The intent is journalled, the custodian does it, the report is journalled: after a crash between
    any two of these, or beside another process that does the same, calling it again ends with one
    report, the same for all.

    :param progress: Of :func:`build_settlement`; kept in the journal.
    :param by: Who settles, for people: the task and its try.
    :raises BroadwayError: Whatever the custodian raises; the generation then counts as unsettled.
    """
    done = settled_journal(run, record.generation)
    if done is not None:
        run.forget_open(record.generation)
        return done.report
    intent = {
        "version": VERSION,
        "generation": record.generation,
        "rest": settlement.rest.action.value,
        "expected": settlement.expected,
        "by": by or host_name(),
        "at": run.clock.now().isoformat(),
    }
    if not run.files.create(paths.intent(record.generation), json.dumps(intent)):
        log.info("generation %s: settling was begun before; going on", record.generation)
    report = custodian.settle(run.lease(record), settlement)
    return record_settled(run, record, report, progress=progress, by=by).report
