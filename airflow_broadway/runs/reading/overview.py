"""A run at a glance: its executions, the way of its messages, the sum of them, its leases.

Of a run that goes on the numbers are as of now; what nobody can know yet is ``None``, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import look_lines
from airflow_broadway.core.formats.isolation import CRASHED
from airflow_broadway.core.formats.live import LiveCounts, read_live
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.runs.account import account_of, isolation_of, kept_report, totals_of
from airflow_broadway.runs.heartbeat import Heartbeat, name_of
from airflow_broadway.runs.reading.batches import reads_ahead
from airflow_broadway.runs.reading.reasons import Reasons, reasons_in
from airflow_broadway.runs.reading.runs import RunSummary, summary_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import (
    OPENED,
    SETTLED,
    GenerationRecord,
    StagedRun,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """The right to hold an execution's messages.

    :param deadline: When it lapses unless it is renewed.
    :param remaining: Seconds until then; negative once it has lapsed.
    :param by_task: Whether the process task renews it by itself, and nobody else knows the deadline
        as of now.
    """

    deadline: datetime
    remaining: float
    by_task: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One execution of a process task, a generation.

    :param broker: The kind of what holds its messages, such as ``"sqlite"``.
    :param received: Messages by its manifest, or, while it receives, as it last said; ``None``: it
        has said nothing yet.
    :param rate: Messages received in a second.
    :param failed: Of these, failed before any batch.
    :param live: Whether it has published no manifest: the numbers are those of a moment ago.
    :param lease: ``None`` once it is settled.
    :param account: Its messages by class, as in a report; ``None`` without a manifest or journal.
    """

    generation: str
    task: str
    task_id: str
    map_index: int
    try_number: int
    state: str
    opened_at: str
    broker: str
    received: int | None
    received_bytes: int | None
    failed: int | None
    rate: float | None
    batchers: Mapping[str, int]
    stopped: str
    live: bool
    lease: LeaseFacts | None
    account: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The way through one batcher.

    :param staged: Messages that were staged for it.
    :param planned: Messages in its batches; ``None`` before they are planned.
    :param done: Batches with an outcome, and ``handled`` the messages in them.
    :param failed_batches: Batches that failed whole.
    :param successful: Messages that succeeded, and ``failed``, ``missing`` such as did not; all
        ``None`` where there are too many outcomes to read before the run has its report.
    :param rate: Messages handled in a second, from the first batch's start to the last one's end.
    :param triggers: Why batches were closed, and how many for that.
    :param split: Batches that processes died of, and were split.
    :param crashed: Messages that were set aside, since processes died of them.
    :param applications: Spark's names of the applications that handled batches.
    """

    batcher: str
    staged: int
    planned: int | None
    batches: int
    done: int
    handled: int
    successful: int | None = None
    failed: int | None = None
    missing: int | None = None
    failed_batches: int | None = None
    rate: float | None = None
    triggers: Mapping[str, int] = field(default_factory=dict)
    split: int = 0
    crashed: int = 0
    applications: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run of one pipeline.

    :param path: Its folder in staging.
    :param totals: Messages received, and by class; as in a report.
    :param balanced: Whether the sum is right; ``None`` while something is unsettled.
    :param settled: Whether each execution is settled.
    :param watched: Whether an ack sensor has looked within the last minute.
    :param report_at: When the report was written; empty without one.
    :param look: What a dry run found, in sentences; empty of any other run.
    """

    summary: RunSummary
    path: str
    source: Mapping[str, Any]
    notes: Sequence[str]
    receipts: Sequence[Receipt]
    flows: Sequence[Flow]
    totals: Mapping[str, int]
    balanced: bool | None
    settled: bool
    watched: bool
    reasons: Reasons
    isolation: Mapping[str, Any]
    failed_tasks: Sequence[str]
    errors: Sequence[str]
    report_at: str
    look: Sequence[str] = ()

    @property
    def receiving(self) -> int | None:
        """Messages of executions that have published nothing yet; they are in no sum."""
        counts = [each.received for each in self.receipts if each.live]
        return None if not counts or None in counts else sum(each or 0 for each in counts)

    @property
    def unpublished_failures(self) -> int:
        """Messages that have failed in executions that have published nothing yet."""
        return sum(each.failed or 0 for each in self.receipts if each.live)

    @property
    def all_failed(self) -> bool:
        """Whether no message succeeded, and some failed."""
        failed = self.totals.get("dead_lettered", 0) + self.totals.get("requeued", 0)
        return bool(failed) and not self.totals.get("acked", 0)


def overview_of(
    run: StagedRun, *, clock: Clock | None = None, recorded: Recorded | None = None
) -> Overview:
    """What a run's files say now.

    :raises StagingError: If they cannot be read, or are not as they were written.
    """
    clock = clock or SystemClock()
    recorded = recorded or Recorded(run)
    records = run.generations()
    report = kept_report(run)
    receipts = [_receipt(run, record, clock) for record in records]
    current = report if report is not None and _is_current(report, records) else None
    flows = _flows(recorded, receipts, current)
    settled = bool(report or records) and all(each.state == SETTLED for each in records)
    if records:
        accounts = [each.account for each in receipts if each.account is not None]
        failed = {each.batcher: {"failed": each.failed or 0} for each in flows}
        totals = totals_of(accounts, failed)
        balanced = all(each["balanced"] for each in accounts) if settled else None
    else:  # of an empty run the report is all that is left
        totals = report["totals"] if report else dict.fromkeys(("received", *CLASSES), 0)
        balanced = report["balanced"] if report else None
    about = current or {}
    found = (report or {}).get("look")
    return Overview(
        summary=summary_of(run),
        path=f"{run.store.uri}/{run.path}",
        source=next((each.source for each in reversed(records) if each.source), {})
        or (report or {}).get("source", {}),
        notes=about.get("notes", ()),
        receipts=receipts,
        flows=flows,
        totals=totals,
        balanced=balanced,
        settled=settled,
        watched=Heartbeat(run, clock).is_fresh(),
        reasons=reasons_in(recorded, records, [each.batcher for each in flows], current),
        isolation=isolation_of(recorded, [each.batcher for each in flows])
        if run.files.list("deaths") or run.files.list("interruptions")
        else {},
        failed_tasks=about.get("failed_tasks", ()),
        errors=_errors(receipts),
        report_at=(report or {}).get("at", ""),
        look=() if found is None else look_lines(found),
    )


def _is_current(report: Mapping[str, Any], records: Sequence[GenerationRecord]) -> bool:
    """Whether a report tells of all executions: a task may have been cleared since."""
    told = {each["generation"] for each in report["generations"]}
    return all(each.generation in told and each.state == SETTLED for each in records)


def _errors(receipts: Sequence[Receipt]) -> list[str]:
    return sorted({error for each in receipts if each.account for error in each.account["errors"]})


# -- executions ------------------------------------------------------------------------------------


def _receipt(run: StagedRun, record: GenerationRecord, clock: Clock) -> Receipt:
    manifest = run.manifest(record.generation) if record.state != OPENED else None
    live = read_live(run.files, record.generation) if record.state == OPENED else None
    about: dict[str, Any] = {
        "generation": record.generation,
        "task": name_of(record),
        "task_id": record.task_id,
        "map_index": record.map_index,
        "try_number": record.try_number,
        "state": record.state,
        "opened_at": record.opened_at,
        "broker": str(record.lease.get("kind", "")),
        "live": record.state == OPENED,
        "lease": None if record.state == SETTLED else _lease(run, record, live, clock),
        "account": None if record.state == OPENED else account_of(run, record),
    }
    if manifest is not None:
        return Receipt(**about, **_of_manifest(manifest))
    return Receipt(**about, **_of_live(live, record))


def _of_manifest(manifest: Manifest) -> dict[str, Any]:
    seconds = manifest.seconds.get("total", 0.0)
    return {
        "received": manifest.received,
        "received_bytes": manifest.received_bytes,
        "failed": manifest.failed,
        "rate": manifest.received / seconds if seconds else None,
        "batchers": manifest.batchers,
        "stopped": manifest.stopped,
    }


def _of_live(live: LiveCounts | None, record: GenerationRecord) -> dict[str, Any]:
    if live is None:
        return {
            **dict.fromkeys(("received", "received_bytes", "failed", "rate")),
            "batchers": {},
            "stopped": "",
        }
    opened = datetime.fromisoformat(record.opened_at)
    seconds = (live.at - opened).total_seconds()
    return {
        "received": live.received,
        "received_bytes": live.received_bytes,
        "failed": live.failed,
        "rate": live.received / seconds if seconds > 0 else None,
        "batchers": live.batchers,
        "stopped": "",
    }


def _lease(
    run: StagedRun, record: GenerationRecord, live: LiveCounts | None, clock: Clock
) -> LeaseFacts:
    lease = run.lease(record)
    deadline = lease.deadline if live is None else max(lease.deadline, live.deadline)
    return LeaseFacts(
        deadline=deadline,
        remaining=(deadline - clock.now()).total_seconds(),
        by_task=record.state == OPENED,
    )


# -- batchers --------------------------------------------------------------------------------------


def _flows(
    recorded: Recorded, receipts: Sequence[Receipt], report: Mapping[str, Any] | None
) -> list[Flow]:
    staged: dict[str, int] = {}
    for each in receipts:
        for batcher, count in each.batchers.items():
            staged[batcher] = staged.get(batcher, 0) + count
    there = recorded.run.files.list("batches")
    told = (report or {}).get("batchers", {})
    names = sorted({*staged, *there, *told})
    return [_flow(recorded, name, staged.get(name, 0), told.get(name)) for name in names]


#: What is told of a batcher before anything is planned for it.
_NOTHING: Final[dict[str, Any]] = {"planned": None, "batches": 0, "done": 0, "handled": 0}


def _flow(recorded: Recorded, batcher: str, staged: int, told: Mapping[str, Any] | None) -> Flow:
    plans = recorded.counted(batcher)
    if not plans:
        return Flow(batcher=batcher, staged=staged, **_NOTHING)
    done = [
        batch
        for plan in plans
        for batch in recorded.batches(plan)
        if batch.batch_id in recorded.ids(plan)
    ]
    triggers: dict[str, int] = {}
    for plan in plans:
        for trigger, count in plan.triggers.items():
            triggers[trigger] = triggers.get(trigger, 0) + count
    about: dict[str, Any] = {
        "batcher": batcher,
        "staged": staged,
        "planned": sum(plan.messages for plan in plans),
        "batches": sum(len(recorded.batches(plan)) for plan in plans),
        "done": len(done),
        "handled": sum(batch.size for batch in done),
        "triggers": triggers,
        "split": sum(recorded.split(plan) for plan in plans),
        "notes": [note for plan in plans for note in plan.notes],
    }
    if reads_ahead(recorded, plans):
        outcomes = [
            outcome
            for plan in plans
            for _, outcome in recorded.outcomes(plan)
            if outcome is not None
        ]
        return Flow(**about, **_of_outcomes(outcomes))
    if told:
        counts = {name: told[name] for name in ("successful", "failed", "failed_batches")}
        return Flow(**about, **counts)
    return Flow(**about)


def _of_outcomes(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "successful": sum(each.successful for each in outcomes),
        "failed": sum(each.failed for each in outcomes),
        "missing": sum(each.missing for each in outcomes),
        "failed_batches": sum(bool(each.error) for each in outcomes),
        "crashed": sum(each.error.startswith(CRASHED) for each in outcomes),
        "rate": _rate(outcomes),
        "applications": sorted({each.application_id for each in outcomes} - {""}),
    }


def _rate(outcomes: Sequence[Outcome]) -> float | None:
    """Messages a second, over the time in which batches were handled."""
    timed = [each for each in outcomes if each.started_at]
    if not timed:
        return None
    starts = [datetime.fromisoformat(each.started_at).timestamp() for each in timed]
    ends = [start + each.seconds for start, each in zip(starts, timed, strict=True)]
    took = max(ends) - min(starts)
    messages = sum(each.successful + each.failed + each.missing for each in timed)
    return messages / took if took > 0 else None
