"""Overview of a run: executions, message flow per batcher, totals and leases.

Numbers of an active run are current.  Unknown values are ``None``, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import look_lines
from airflow_broadway.core.formats.live import LiveCounts, read_live
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.runs.account import account_of, isolation_of, kept_report, totals_of
from airflow_broadway.runs.heartbeat import Heartbeat, name_of
from airflow_broadway.runs.reading.batches import reads_ahead
from airflow_broadway.runs.reading.reasons import Reason, reasons_in
from airflow_broadway.runs.reading.runs import RunSummary, summary_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import OPENED, SETTLED, GenerationRecord, StagedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """The lease on an execution's messages.

    :param deadline: Time at which it lapses unless renewed.
    :param remaining: Seconds until then; negative once it has lapsed.
    :param by_task: Whether the process task renews it; the deadline may then be out of date.
    """

    deadline: datetime
    remaining: float
    by_task: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One execution of a process task, which is one generation.

    :param broker: The kind of broker that holds its messages, such as ``"sqlite"``.
    :param received: Messages by its manifest, or the last reported count while it receives;
        ``None`` before the first report.
    :param rate: Messages received per second.
    :param failed: Messages that failed before any batch.
    :param live: Whether it has no manifest yet; its numbers may then be slightly out of date.
    :param lease: ``None`` once it is settled.
    :param account: Its messages by outcome class, as in a report; ``None`` without a manifest or
        journal.
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
    """The message flow through one batcher.

    :param staged: Messages staged for it.
    :param planned: Messages in its batches; ``None`` before they are planned.
    :param done: Batches with an outcome, and ``handled`` the messages in them.
    :param successful: Messages that succeeded; ``failed`` and ``missing`` count those that did not.
        All are ``None`` while there is no report and there are too many outcomes to read.
    :param rate: Messages handled per second, from the first batch's start to the last one's end.
    :param applications: Ids of the Spark applications that handled batches.
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
    rate: float | None = None
    applications: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run of one pipeline.

    :param path: Its folder in staging.
    :param totals: Messages received and by outcome class, as in a report.
    :param balanced: Whether the classes add up; ``None`` while an execution is unsettled.
    :param settled: Whether every execution is settled.
    :param watched: Whether an ack sensor has poked the run within the last minute.
    :param reasons: The failure reasons, most frequent first; ``None`` if they are not known.
    :param look: Findings of a dry run, as sentences; empty for any other run.
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
    reasons: Sequence[Reason] | None
    isolation: Mapping[str, Any]
    errors: Sequence[str]
    look: Sequence[str] = ()

    @property
    def receiving(self) -> int | None:
        """Messages of executions without a manifest, which are not in the totals."""
        counts = [receipt.received for receipt in self.receipts if receipt.live]
        return None if not counts or None in counts else sum(count or 0 for count in counts)

    @property
    def unpublished_failures(self) -> int:
        """Failed messages of executions without a manifest."""
        return sum(receipt.failed or 0 for receipt in self.receipts if receipt.live)

    @property
    def all_failed(self) -> bool:
        """Whether some messages failed and none succeeded."""
        failed = self.totals.get("dead_lettered", 0) + self.totals.get("requeued", 0)
        return bool(failed) and not self.totals.get("acked", 0)


def overview_of(run: StagedRun, *, recorded: Recorded | None = None) -> Overview:
    """Builds the overview of a run from its files.

    :raises StagingError: If they cannot be read or are damaged.
    """
    clock = SystemClock()
    recorded = recorded or Recorded(run)
    records = run.generations()
    report = kept_report(run)
    receipts = [_receipt(run, record, clock) for record in records]
    current = report if report is not None and _is_current(report, records) else None
    flows = _flows(recorded, receipts, current)
    settled = bool(report or records) and all(record.state == SETTLED for record in records)
    accounts = [receipt.account for receipt in receipts if receipt.account is not None]
    if records:
        failed = {flow.batcher: {"failed": flow.failed or 0} for flow in flows}
        totals = totals_of(accounts, failed)
        balanced = all(account["balanced"] for account in accounts) if settled else None
    else:  # the report is the only file of an empty run
        totals = report["totals"] if report else dict.fromkeys(("received", *CLASSES), 0)
        balanced = report["balanced"] if report else None
    batchers = [flow.batcher for flow in flows]
    look = (report or {}).get("look")
    return Overview(
        summary=summary_of(run),
        path=f"{run.store.uri}/{run.path}",
        source=next((record.source for record in reversed(records) if record.source), {})
        or (report or {}).get("source", {}),
        notes=(current or {}).get("notes", ()),
        receipts=receipts,
        flows=flows,
        totals=totals,
        balanced=balanced,
        settled=settled,
        watched=Heartbeat(run, clock).is_fresh(),
        reasons=reasons_in(recorded, records, batchers, current),
        isolation=isolation_of(recorded, batchers)
        if run.files.list("deaths") or run.files.list("interruptions")
        else {},
        errors=sorted({error for account in accounts for error in account["errors"]}),
        look=() if look is None else look_lines(look),
    )


def _is_current(report: Mapping[str, Any], records: Sequence[GenerationRecord]) -> bool:
    """Whether a report covers all executions: a task may have been cleared since."""
    reported = {generation["generation"] for generation in report["generations"]}
    return all(record.generation in reported and record.state == SETTLED for record in records)


# -- executions ------------------------------------------------------------------------------------


def _receipt(run: StagedRun, record: GenerationRecord, clock: Clock) -> Receipt:
    opened = record.state == OPENED
    live = read_live(run.files, record.generation) if opened else None
    manifest = None if opened else run.manifest(record.generation)
    counts, seconds = live or manifest, 0.0
    if live is not None:
        seconds = (live.at - datetime.fromisoformat(record.opened_at)).total_seconds()
    elif manifest is not None:
        seconds = manifest.seconds.get("total", 0.0)
    return Receipt(
        generation=record.generation,
        task=name_of(record),
        task_id=record.task_id,
        map_index=record.map_index,
        try_number=record.try_number,
        state=record.state,
        opened_at=record.opened_at,
        broker=str(record.lease.get("kind", "")),
        received=None if counts is None else counts.received,
        received_bytes=None if counts is None else counts.received_bytes,
        failed=None if counts is None else counts.failed,
        rate=counts.received / seconds if counts is not None and seconds > 0 else None,
        batchers={} if counts is None else counts.batchers,
        stopped="" if manifest is None else manifest.stopped,
        live=opened,
        lease=None if record.state == SETTLED else _lease(run, record, live, clock),
        account=None if opened else account_of(run, record),
    )


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
    staged = Counter[str]()
    for receipt in receipts:
        staged.update(receipt.batchers)
    reported = (report or {}).get("batchers", {})
    names = sorted({*staged, *recorded.run.files.list("batches"), *reported})
    return [_flow(recorded, name, staged[name], reported.get(name)) for name in names]


def _flow(recorded: Recorded, batcher: str, staged: int, row: Mapping[str, Any] | None) -> Flow:
    plans = recorded.counted(batcher)
    batches = [(plan, batch) for plan in plans for batch in recorded.batches(plan)]
    done = [batch for plan, batch in batches if batch.batch_id in recorded.ids(plan)]
    flow = Flow(
        batcher=batcher,
        staged=staged,
        planned=sum(plan.messages for plan in plans) if plans else None,
        batches=len(batches),
        done=len(done),
        handled=sum(batch.size for batch in done),
    )
    if plans and reads_ahead(recorded, plans):
        outcomes = list(recorded.handled(plans))
        return replace(
            flow,
            successful=sum(outcome.successful for outcome in outcomes),
            failed=sum(outcome.failed for outcome in outcomes),
            missing=sum(outcome.missing for outcome in outcomes),
            rate=_rate(outcomes),
            applications=sorted({outcome.application_id for outcome in outcomes} - {""}),
        )
    if plans and row:
        return replace(flow, successful=row["successful"], failed=row["failed"])
    return flow


def _rate(outcomes: Sequence[Outcome]) -> float | None:
    """Calculates messages per second over the time in which batches were handled."""
    timed = [outcome for outcome in outcomes if outcome.started_at]
    if not timed:
        return None
    starts = [datetime.fromisoformat(outcome.started_at).timestamp() for outcome in timed]
    ends = [start + outcome.seconds for start, outcome in zip(starts, timed, strict=True)]
    took = max(ends) - min(starts)
    messages = sum(outcome.successful + outcome.failed + outcome.missing for outcome in timed)
    return messages / took if took > 0 else None
