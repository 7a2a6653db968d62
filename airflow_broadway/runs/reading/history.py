"""Recent runs of a pipeline (throughput, failures, delay) and the messages in unsettled executions.

The caller names the runs, because a pipeline may have ten thousand; no file of any other run is
read.  A run costs one file, its report.  Unsettled executions cost a listing and three files each.
Unknown values are ``None``, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.report import handled_of
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.live import read_live
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.account import REPORT, summarize_trouble
from airflow_broadway.staging.run_folder import OPENED, SETTLED, StagedRun, iter_open
from airflow_broadway.staging.store import Store

#: Severity of a sign: act, or check.
BAD, WARN = "bad", "warn"
#: A lease with less than this share of its duration left is overdue for renewal.
_LATE_SHARE: Final = 0.25
#: Dead letters of a run or at a broker that raise a warning.
MANY_DEAD: Final = 100
#: Share of a run's messages that failed from which a warning is raised.
MANY_FAILED: Final = 0.1
#: Age of the oldest message in seconds from which a warning is raised.
OLD_BACKLOG: Final = 3600.0


class RunKey(NamedTuple):
    """A run of a pipeline."""

    pipeline: str
    dag_id: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run that has its report.

    :param started: Start of its first execution; ``None`` if it received nothing.
    :param ended: Time of the report.
    :param seconds: Seconds between ``started`` and ``ended``.
    :param per_minute: Received messages per minute over these seconds.
    :param failure_share: Failed messages divided by messages with an outcome: 0 to 1.
    :param waited: The longest time in seconds that a message had waited at its broker.
    :param trouble: The problem that needs attention; empty if there is none.
    :param source: The kind of source, if not the queue.
    :param dry: Whether it was a dry run, which is not counted.
    """

    run_id: str
    started: datetime | None
    ended: datetime
    received: int
    acked: int
    dead_lettered: int
    failed: int
    seconds: float | None
    per_minute: float | None
    failure_share: float | None
    waited: float | None
    balanced: bool
    trouble: str
    source: str
    dry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Messages held by executions that are not settled.

    :param messages: Messages by manifest, or by the last reported count of executions that are
        still receiving; ``None`` if unknown.
    :param receiving: Executions without a manifest, which may hold more by now.
    :param late: Sentences about leases overdue for renewal, and about unreadable files.
    :param run_ids: The runs, oldest first.
    """

    messages: int | None
    receiving: int
    late: Sequence[str]
    run_ids: Sequence[str]


class Sign(NamedTuple):
    """A problem of a pipeline that needs attention.

    :param run_id: The run concerned, if there is one.
    """

    level: str
    sentence: str
    run_id: str | None = None


# -- runs ------------------------------------------------------------------------------------------


def past_runs(store: Store, keys: Iterable[RunKey]) -> dict[RunKey, PastRun]:
    """Returns those of these runs that have a report; reads one file per run, concurrently.

    :raises StagingError: If the root cannot be read.
    """
    files = {f"{StagedRun(store, **key._asdict()).path}/{REPORT}": key for key in keys}
    runs: dict[RunKey, PastRun] = {}
    for path, text in store.folder("").read_all(list(files)):
        try:
            runs[files[path]] = _parse_report(files[path].run_id, json.loads(text or ""))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # without a report; the run's own page explains a damaged one
    return runs


def _parse_report(run_id: str, report: Mapping[str, Any]) -> PastRun:
    totals, generations = report["totals"], report["generations"]
    starts = [
        datetime.fromisoformat(entry["started_at"]) for entry in generations if entry["started_at"]
    ]
    waits = [entry["waited"] for entry in generations if entry.get("waited") is not None]
    started, ended = min(starts, default=None), datetime.fromisoformat(report["at"])
    seconds = None if started is None else max(0.0, (ended - started).total_seconds())
    handled = handled_of(totals)
    return PastRun(
        run_id=run_id,
        started=started,
        ended=ended,
        received=totals["received"],
        acked=totals["acked"],
        dead_lettered=totals["dead_lettered"],
        failed=totals["failed"],
        seconds=seconds,
        per_minute=totals["received"] * 60.0 / seconds if seconds else None,
        failure_share=totals["failed"] / handled if handled else None,
        waited=max(waits, default=None),
        balanced=bool(report["balanced"]),
        trouble=summarize_trouble(report),
        source=str((report.get("source") or {}).get("kind", "")),
        dry=bool(report.get("look")),
    )


# -- held messages ---------------------------------------------------------------------------------


def held_messages(store: Store, pipeline: str, dag_id: str, now: datetime) -> Held:
    """Counts the messages that unsettled executions of a pipeline in a Dag hold.

    :raises StagingError: If the root or a file of a run cannot be read.
    """
    messages = receiving = 0
    late: list[str] = []
    run_ids: dict[str, None] = {}
    for run, record in iter_open(store, pipeline, dag_id):
        if record.state == SETTLED:
            continue
        run_ids[run.run_id] = None
        if record.state == OPENED:  # its own task renews the lease
            live = read_live(run.files, record.generation)
            receiving += 1
            messages += live.received if live is not None else 0
            continue
        path = paths.manifest(record.generation)
        try:
            received = Manifest.loads(run.files.read(path), path).received
        except FileNotFoundError:  # released before it was published
            continue
        messages += received
        lease = run.lease(record)
        left = (lease.deadline - now).total_seconds()
        if received and left < _LATE_SHARE * lease.seconds:
            late.append(
                f"The lease on {pluralize(received, 'message')} of the run {run.run_id}"
                + (f" lapses in {left:,.0f} s." if left > 0 else " has lapsed.")
            )
    return Held(messages=messages, receiving=receiving, late=tuple(late), run_ids=tuple(run_ids))


# -- signs of trouble ------------------------------------------------------------------------------


def signs_of(runs: Sequence[PastRun], held: Held | None, failed: str | None = None) -> list[Sign]:
    """Lists problems of a pipeline that need attention, most severe first.

    :param runs: Recent runs, newest first; dry runs are skipped.
    :param failed: The newest run, if its state in Airflow is failed.
    """
    runs = [run for run in runs if not run.dry]
    signs = [Sign(BAD, sentence) for sentence in (held.late if held is not None else ())]
    signs += [
        Sign(BAD, f"The run {run.run_id} does not balance.", run.run_id)
        for run in runs
        if not run.balanced
    ]
    newest = runs[0] if runs else None
    if newest is not None and newest.trouble and newest.balanced:
        signs.append(Sign(BAD, f"The last run: {newest.trouble}.", newest.run_id))
    elif failed is not None and (newest is None or newest.run_id != failed):
        signs.append(Sign(BAD, "The last run failed, and was not accounted for.", failed))
    elif failed is not None and newest is not None and newest.balanced:
        signs.append(Sign(WARN, "A task of the last run failed.", failed))
    if newest is not None and newest.balanced and not newest.trouble:
        signs += _signs_of_newest(newest)
    return signs


def _signs_of_newest(run: PastRun) -> list[Sign]:
    """Lists warnings about a run without errors."""
    signs = []
    if run.dead_lettered >= MANY_DEAD:
        messages = pluralize(run.dead_lettered, "message")
        signs.append(Sign(WARN, f"{messages} of the last run became dead letters.", run.run_id))
    if run.failure_share is not None and run.failure_share >= MANY_FAILED:
        share = f"{run.failure_share:.0%} of the messages of the last run failed."
        signs.append(Sign(WARN, share, run.run_id))
    return signs


def waiting_signs(dead: int | None, oldest_age: float | None, as_of: str) -> list[Sign]:
    """Lists warnings about the backlog and the dead letters at the broker.

    :param as_of: Time of the measurement, as readable text.
    """
    signs = []
    if dead is not None and dead >= MANY_DEAD:
        text = f"{pluralize(dead, 'dead letter')} lie at the broker (as of {as_of})."
        signs.append(Sign(WARN, text))
    if oldest_age is not None and oldest_age >= OLD_BACKLOG:
        text = f"The oldest message had waited for {oldest_age / 3600.0:,.1f} h (as of {as_of})."
        signs.append(Sign(WARN, text))
    return signs
