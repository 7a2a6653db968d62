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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core.custody import (
    ACK,
    RELEASE,
    Action,
    Custodian,
    Entry,
    Settlement,
    SettleReport,
    Verdict,
)
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.manifest import (
    VERSION,
    BatchPlan,
    EntryLine,
    Manifest,
    check_version,
    load_line,
    paths,
)
from airflow_broadway.core.producer import Producer
from airflow_broadway.staging.plans import outcomes_of
from airflow_broadway.staging.run import GenerationRecord, StagedRun
from airflow_broadway.staging.store import host_name
from airflow_broadway.staging.tables import ParquetFile

if TYPE_CHECKING:
    from airflow_broadway.core.broadway import Broadway

__all__ = [
    "Journal",
    "Progress",
    "build_settlement",
    "record_settled",
    "settle_generation",
    "settled_journal",
]

log = logging.getLogger(__name__)

_COUNTED = {
    Action.ACK: "acked",
    Action.RETRY: "requeued",
    Action.DEAD_LETTER: "dead_lettered",
    Action.LEAVE: "left",
    Action.RELEASE: "released",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a generation has come.

    :param received: Messages by the manifest; 0 without one.
    :param staged: Of these, staged for batchers.
    :param decided: Of the staged, those of batches with an outcome.
    :param batches: Batches that hold messages of the generation; ``recorded``: with an outcome.
    :param unplanned: Batchers that have messages of it but no plan.
    :param settled_now: What callbacks settled at once, in processors and batches.
    """

    received: int = 0
    staged: int = 0
    decided: int = 0
    batches: int = 0
    recorded: int = 0
    unplanned: tuple[str, ...] = ()
    settled_now: SettleReport = field(default_factory=SettleReport)


class _Exceptions(NamedTuple):
    """A file of entries of one outcome."""

    path: str
    source: int
    shared: bool  # whether the batch holds messages of other generations too


class _Recorded(NamedTuple):
    """The batches of one plan that have an outcome and messages of the generation."""

    plan: BatchPlan
    source: int
    ranges: list[list[int]]
    files: set[int]


def build_settlement(
    run: StagedRun,
    generation: str,
    pipeline: Broadway,
    plans: Sequence[BatchPlan] | None,
    *,
    final: bool,
) -> tuple[Settlement, bool, Progress]:
    """Say what becomes of each message of one generation, by what is recorded now.

    :param plans: Those of the run's batchers that hold messages of it; one per batcher.
    :param final: Nothing more will be recorded: say so in the log where something is missing.
    :returns: The settlement; whether every message has an outcome (otherwise carrying it out
        releases those that have none); and the counts.
    """
    manifest = run.manifest(generation)
    if manifest is None:
        return Settlement(rest=RELEASE, settled_now=SettleReport()), False, Progress()
    held = _Held(run, manifest, pipeline.producer, list(plans or ()))
    complete = held.decided == held.staged
    if final and not complete:
        log.warning(
            "generation %s: %d of %d staged messages have no outcome and are given back%s",
            generation,
            held.staged - held.decided,
            held.staged,
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
        self, run: StagedRun, manifest: Manifest, producer: Producer, plans: list[BatchPlan]
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._producer = producer
        #: Whether every success that has no entry is simply acked.
        self.plain = producer.actions[producer.on_success] is Action.ACK and not manifest.configured
        self.staged = sum(manifest.batchers.values())
        self.decided = self.batches = self.recorded_batches = 0
        self._exceptions: list[_Exceptions] = []
        self._recorded: list[_Recorded] = []
        by_batcher = {
            plan.batcher: plan for plan in plans if manifest.generation in plan.generations
        }
        self.unplanned = [
            name for name, count in manifest.batchers.items() if count and name not in by_batcher
        ]
        for plan in by_batcher.values():
            self._look(plan)

    def _look(self, plan: BatchPlan) -> None:
        self._run.store.check_root(plan.root_id, plan.host)
        generation = self._manifest.generation
        source = plan.generations.index(generation)
        recorded = _Recorded(plan, source, [], set())
        for planned, outcome in outcomes_of(self._run, plan):
            count = planned.sources.get(generation, 0)
            if not count:
                continue
            self.batches += 1
            if outcome is None:
                continue
            self.recorded_batches += 1
            self.decided += count
            recorded.ranges.extend(planned.rows)
            recorded.files.update(planned.files)
            if outcome.entries is not None:
                shared = len(planned.sources) > 1
                self._exceptions.append(_Exceptions(outcome.entries, source, shared))
        if recorded.ranges:
            recorded.ranges.sort()
            self._recorded.append(recorded)

    # -- exceptions ----------------------------------------------------------------------------

    def _before_batches(self) -> Iterator[EntryLine]:
        for path in self._manifest.entries:
            for line in self._run.files.lines(path):
                yield load_line(line)

    def _in_batches(self) -> Iterator[EntryLine]:
        """The exceptions that outcomes name, of this generation only."""
        unsure = self._unsure()
        for found in self._exceptions:
            for text in self._run.files.lines(found.path):
                line = load_line(text)
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
            for line in map(load_line, self._run.files.lines(found.path))
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
                counts[_COUNTED[line.entry.verdict.action]] += 1
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
            for recorded in self._recorded:
                yield from self._successes(recorded, exceptions)

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
        for files in self._manifest.files.values():
            for path in files:
                with ParquetFile(self._run.files, path) as file:
                    for group in range(file.groups):
                        yield from file.read(group, columns).to_pylist()

    def _successes(self, recorded: _Recorded, exceptions: set[str]) -> Iterator[Entry]:
        """The plain successes of batches with an outcome, each with its own verdict."""
        producer, plan = self._producer, recorded.plan
        columns = ["message_id", "batch", "source", "attempt", "_receipt", "_on_success", "_acked"]
        columns += self._payload_columns()
        for index in sorted(recorded.files):
            with ParquetFile(self._run.files, f"{plan.path}/{plan.data[index]}") as file:
                for group in range(file.groups):
                    if not _holds(recorded.ranges, *file.bounds(group, "batch")):
                        continue
                    for row in file.read(group, columns).to_pylist():
                        if (
                            row["source"] != recorded.source
                            or row["_acked"]
                            or row["message_id"] in exceptions
                            or not _holds(recorded.ranges, row["batch"], row["batch"])
                        ):
                            continue
                        action = producer.actions[row["_on_success"] or producer.on_success]
                        yield _entry(row, producer.decide(action, row["attempt"], "", ""))


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


# --------------------------------------------------------------------------------------------------
# The journal
# --------------------------------------------------------------------------------------------------


class Journal(NamedTuple):
    """What became of a settled generation.

    :param report: What settling it did.
    :param settled_now: What callbacks had settled at once, in processors and batches.
    :param received: Messages by its manifest; ``None`` if it published none.
    :param by: Who settled it, for people; ``at``: when.
    """

    report: SettleReport
    settled_now: SettleReport
    received: int | None
    by: str
    at: str


def settled_journal(run: StagedRun, generation: str) -> Journal | None:
    """What became of a generation; ``None`` while it is not settled."""
    path = paths.settled(generation)
    try:
        value: dict[str, Any] = json.loads(run.files.read(path))
    except FileNotFoundError:
        return None
    check_version(value, path)
    return Journal(
        SettleReport.from_json(value["report"]),
        SettleReport.from_json(value["settled_now"]),
        value["received"],
        value["by"],
        value["at"],
    )


def record_settled(
    run: StagedRun,
    record: GenerationRecord,
    report: SettleReport,
    *,
    progress: Progress | None = None,
    by: str = "",
) -> Journal:
    """Note what settling a generation did, unless it is noted already; what stands is returned.

    :raises StagingError: If it cannot be written.
    """
    progress = progress or Progress()
    written = {
        "version": VERSION,
        "generation": record.generation,
        "report": report.to_json(),
        "received": progress.received or None,
        "settled_now": progress.settled_now.to_json(),
        "by": by or host_name(),
        "at": run.clock.now().isoformat(),
    }
    if not run.files.create(paths.settled(record.generation), json.dumps(written)):
        log.info("generation %s: it was settled before, or by another", record.generation)
    journal = settled_journal(run, record.generation)
    if journal is None:
        raise StagingError(f"the journal of generation {record.generation} is gone")
    run.forget_open(record.generation)
    return journal


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
