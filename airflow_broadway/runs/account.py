"""Accounts for every message of every execution of a run in ``report.json``."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from airflow_broadway.core.custody.report import APPLIED, CLASSES, SettleReport, failures_of
from airflow_broadway.core.custody.run_summary import (
    failures_trouble,
    markdown_of,
    settling_trouble,
)
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.isolation import CRASHED
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.errors import SETTING
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.retention import mark_balanced
from airflow_broadway.staging.run_folder import SETTLED, GenerationRecord, StagedRun
from airflow_broadway.staging.settling.journal import settled_journal
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)

#: The report's file, in the run's folder.
REPORT: Final = paths.REPORT
#: The same as Markdown.
REPORT_TEXT: Final = "report.md"
#: The result of a dry run, until the report includes it.
LOOK: Final = "look.json"


def keep_report(
    run: StagedRun,
    records: Sequence[GenerationRecord],
    *,
    at: datetime,
    batchers: Mapping[str, Any] = MappingProxyType({}),
    reasons: Sequence[Mapping[str, Any]] = (),
    failed_tasks: Sequence[str] = (),
    isolation: Mapping[str, Any] | None = None,
    look: Mapping[str, Any] | None = None,
    missing: str = "",
    empty: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Accounts for the executions of a run and writes the report to the run's folder.

    Marks a balanced run, so that retention may remove it.  Of an empty run only the report is kept.
    The run's settled generations are no longer listed as open.

    :param isolation: Deaths of processes and their results, if any; see :func:`isolation_of`.
    :param look: The result of a dry run.
    :param missing: A sentence about messages of the process tasks that are not in this folder; see
        :func:`unseen`.
    :param empty: Generation → the reference of its process task, for those without messages.
    :param batchers: Batches by trigger and outcome, per batcher; see :func:`batchers_of`.
    :param reasons: The failure reasons, most frequent first; see
        :func:`airflow_broadway.runs.reading.reasons.count_reasons`.
    :raises StagingError: If the report cannot be written.
    """
    generations = [account_of(run, record) for record in records]
    for account in generations:
        reference = (empty or {}).get(account["generation"], {})
        account |= {name: reference[name] for name in ("receives", "depth") if name in reference}
    totals = totals_of(generations, batchers)
    report = {
        "version": VERSION,
        "pipeline": run.pipeline,
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "path": f"{run.store.uri}/{run.path}/{REPORT}",
        "totals": totals,
        "balanced": not missing and all(account["balanced"] for account in generations),
        **({"unseen": missing} if missing else {}),
        "generations": generations,
        "batchers": dict(batchers),
        "reasons": list(reasons),
        **({"isolation": isolation} if isolation else {}),
        **({"look": look} if look else {}),
        "failed_tasks": list(failed_tasks),
        "errors": [
            *([missing] if missing else []),
            *sorted({error for account in generations for error in account["errors"]}),
        ],
        **_source_fields(records, run),
        "at": at.isoformat(),
    }
    run.files.replace(REPORT, json.dumps(report, indent=1, sort_keys=True))
    if totals["received"] or look:  # an empty run leaves one file
        run.files.replace(REPORT_TEXT, markdown_of(report))
    # A generation that is still open, such as that of a task just cleared, is for a later report.
    settled = [record for record in records if record.state == SETTLED]
    if report["balanced"]:
        mark_balanced(run)
        if not totals["received"]:
            _forget(run, settled)
    # Last: if the process dies before, a sweep still finds the run and repeats this function.
    run.forget_open(*(record.generation for record in settled))
    return report


def _source_fields(records: Sequence[GenerationRecord], run: StagedRun) -> dict[str, Any]:
    """Returns the source of the messages and its known gaps; empty for the live queue."""
    sources = [record.source for record in records if record.source]
    if not sources:
        return {}
    notes: list[str] = []
    for record in records:
        notes += [note for note in run.lease(record).state.get("notes", ()) if note not in notes]
    return {"source": sources[-1], "notes": notes}


def unseen(
    run: StagedRun, references: Iterable[Mapping[str, Any]], *, settles_itself: bool = False
) -> str:
    """Compares the references of a run's process tasks with its staging folder.

    :param settles_itself: Whether each process task settles its messages before it returns, as in
        a pipeline without batchers.
    :returns: A sentence about messages that are not in this folder; empty if all are.
    """
    effect = "cannot be settled or accounted for here"
    if settles_itself:
        effect = "were settled by the task that received them, and cannot be accounted for here"
    named = [row for row in references if "root_id" in row]  # a dry run stages nothing
    elsewhere = [row for row in named if row["root_id"] != run.store.root_id()]
    if elsewhere:
        received = pluralize(sum(reference["received"] for reference in elsewhere), "message")
        tasks = pluralize(len(elsewhere), "process task")
        try:
            run.store.check_roots(elsewhere)
        except StagingError as error:
            return f"{received} of {tasks} {effect}: {error}"
    differing = [row for row in named if row["received"] != _published(run, row["generation"])]
    if not differing:
        return ""
    first = differing[0]
    others = f", and so do {pluralize(len(differing) - 1, 'other')}" if len(differing) > 1 else ""
    return (
        f"the reference of generation {first['generation']} names"
        f" {pluralize(first['received'], 'message')} that host {first['host']!r} staged under the"
        f" root {first['root_id']}{others}, and host {host_name()!r} sees"
        f" {pluralize(_published(run, first['generation']), 'message')} of it under the same root"
        f" in {run.store.uri}/{run.path}: they {effect}; set {SETTING} to a folder that all hosts"
        " share if one root is a copy of another, restore the files if they were removed"
        f"{'' if settles_itself else ', or clear the process task'}"
    )


def _published(run: StagedRun, generation: str) -> int:
    """Returns the number of messages in a generation's manifest; 0 without one."""
    manifest = run.manifest(generation)
    return 0 if manifest is None else manifest.received


def kept_report(run: StagedRun, name: str = REPORT) -> dict[str, Any] | None:
    """Reads the report; ``None`` if there is none or it is unreadable.

    :param name: :data:`LOOK` for the result of a dry run that has no report yet.
    """
    try:
        report: dict[str, Any] = json.loads(run.files.read(name))
    except (FileNotFoundError, ValueError):
        return None
    return report


def summarize_trouble(report: Mapping[str, Any]) -> str:
    """Returns the problems of a run that need attention as a sentence; empty if there are none."""
    unbalanced = [] if report["balanced"] else ["the sum does not balance"]
    return "; ".join([*unbalanced, *trouble_of(report)])


def trouble_of(report: Mapping[str, Any], fail_when: Any = "all") -> list[str]:
    """Lists the problems of a run that need attention, except that it does not balance.

    :param report: A report of :func:`keep_report`.
    :param fail_when: The threshold of failed messages; see :func:`failures_trouble`.
    """
    totals, failed = report["totals"], report.get("failed_tasks")
    sentences = [
        f"tasks failed: {', '.join(failed)}; fix the cause, the next run receives the released"
        " messages"
        if failed
        else "",
        settling_trouble(totals["lapsed"], totals["settle_failed"], halted=totals.get("halted", 0)),
        failures_trouble(totals, fail_when),
    ]
    return [sentence for sentence in sentences if sentence]


def _forget(run: StagedRun, records: Sequence[GenerationRecord]) -> None:
    """Removes an empty run's files except its report, since most runs of most queues are empty."""
    try:
        run.forget([record.generation for record in records], (paths.HEARTBEAT, LOOK))
    except StagingError as error:
        log.warning("Could not remove the files of an empty run: %s", error)


def totals_of(
    generations: Iterable[Mapping[str, Any]], batchers: Mapping[str, Any]
) -> dict[str, int]:
    """Adds up the accounts of a run's executions.

    :param batchers: As for :func:`keep_report`.
    """
    counts = Counter[str]()
    for account in generations:
        counts.update({k: v for k, v in account.items() if isinstance(v, int)})
    totals = {name: counts[name] for name in ("received", *CLASSES, "accounted")}
    failed = counts["failed"] + sum(batcher["failed"] for batcher in batchers.values())
    totals["failed"] = failures_of(failed, totals)
    totals |= {name: counts[name] for name in ("halted", *APPLIED) if counts[name]}
    return totals


def account_of(run: StagedRun, record: GenerationRecord) -> dict[str, Any]:
    """Accounts for one execution: messages received and per outcome class, as in a report."""
    manifest = run.manifest(record.generation)
    journal = settled_journal(run, record.generation)
    report = journal.report + journal.settled_now if journal else SettleReport()
    received = manifest.received if manifest else report.total
    still_leased = 0 if journal else received
    accounted = report.total + still_leased
    return {
        "generation": record.generation,
        "task_id": record.task_id,
        "map_index": record.map_index,
        "try_number": record.try_number,
        "published": manifest is not None,
        "received": received,
        "failed": manifest.failed if manifest and report.total > report.released else 0,
        **report.classes(still_leased=still_leased),
        **({"halted": report.halted} if report.halted else {}),
        **({name: getattr(manifest, name) for name in APPLIED} if manifest else {}),
        "accounted": accounted,
        "balanced": accounted == received and not still_leased,
        "stopped": manifest.stopped if manifest else "",
        "started_at": manifest.started_at if manifest else "",
        "ended_at": manifest.ended_at if manifest else "",
        "waited": manifest.seconds.get("waited") if manifest else None,
        "errors": list(report.errors),
    }


def batchers_of(recorded: Recorded, batchers: Iterable[str]) -> dict[str, Any]:
    """Counts batches by trigger and outcome, per batcher."""
    by_batcher: dict[str, Any] = {}
    for name in batchers:
        plans = recorded.counted(name)
        outcomes = list(recorded.handled(plans))
        triggers = Counter[str]()
        for plan in plans:
            triggers.update(plan.triggers)
        by_batcher[name] = {
            "messages": sum(plan.messages for plan in plans),
            "batches": sum(plan.batches for plan in plans),
            "successful": sum(outcome.successful for outcome in outcomes),
            "failed": sum(outcome.failed for outcome in outcomes),
            "failed_batches": sum(bool(outcome.error) for outcome in outcomes),
            "triggers": dict(triggers),
            "seconds": round(sum(outcome.seconds for outcome in outcomes), 3),
        }
    return by_batcher


def isolation_of(recorded: Recorded, batchers: Iterable[str]) -> dict[str, Any]:
    """Counts processes and tasks that died at batches, and the split and dead-lettered messages.

    ``split`` counts batches and parts that were split; ``crashed`` counts dead-lettered messages.
    Empty if all are 0.
    """
    by_batcher = {name: recorded.counted(name) for name in batchers}
    if not any(by_batcher.values()):
        return {}
    files = recorded.run.files
    names = files.list("")
    deaths, interruptions = (
        sum(len(files.list(f"{kind}/{folder}")) for folder in files.list(kind))
        if kind in names
        else 0
        for kind in ("deaths", "interruptions")
    )
    batches = []
    for name, plans in by_batcher.items():
        split = sum(map(recorded.split, plans))
        crashed = sum(outcome.error.startswith(CRASHED) for outcome in recorded.handled(plans))
        if split or crashed:
            batches.append({"batcher": name, "split": split, "crashed": crashed})
    if not (deaths or interruptions or batches):
        return {}
    return {"deaths": deaths, "interruptions": interruptions, "batches": batches}
