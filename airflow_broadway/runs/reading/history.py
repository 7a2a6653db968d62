"""The last runs of a pipeline: what they received, how fast, what failed, how late; what is held.

Whoever asks names the runs: a pipeline may have ten thousand, and of those that nobody asks for no
file is looked at.  A run costs one file, its report; what is held costs a listing, and three files
for each execution that is not settled.  What nobody knows is ``None``, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.report import handled_of
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.live import read_live
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.text import many
from airflow_broadway.runs.account import REPORT, summarize_trouble
from airflow_broadway.staging.run_folder import OPENED, SETTLED, StagedRun, iter_open
from airflow_broadway.staging.store import Store

#: How much a sign matters: people are to act, or to look.
BAD, WARN = "bad", "warn"
#: The share of a lease, from its end, in which somebody should have renewed it.
_LATE_SHARE: Final = 0.25
#: From so many dead letters of a run on, or at a broker, people are to look.
MANY_DEAD: Final = 100
#: From this share of a run's messages on, that failed.
MANY_FAILED: Final = 0.1
#: Seconds from which on a message has waited for long.
OLD_BACKLOG: Final = 3600.0


class RunKey(NamedTuple):
    """A run of a pipeline."""

    pipeline: str
    dag_id: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run that was accounted for.

    :param started: When the first of its executions began; ``None`` of one that received nothing.
    :param ended: When it was accounted for.
    :param seconds: From the one to the other.
    :param per_minute: Messages received, by those seconds.
    :param failure_share: Of the messages with an outcome, those that failed: 0 to 1.
    :param waited: For how many seconds, at the most, a message had waited at its broker.
    :param trouble: Why people should look at it; empty if nothing is wrong.
    :param source: Where its messages came from, if not from the queue.
    :param dry: Whether it only looked: it counts for nothing.
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
    """What executions hold that are not settled.

    :param messages: Of those that have published what they received, and of the others what they
        last said; ``None``: not known.
    :param receiving: Executions that have not, and may hold more by now.
    :param late: Sentences on leases that nobody has renewed in time, and on what cannot be read.
    :param run_ids: The runs, the oldest first.
    """

    messages: int | None
    receiving: int
    late: Sequence[str]
    run_ids: Sequence[str]


class Sign(NamedTuple):
    """Why people should look at a pipeline.

    :param run_id: The run to look at, if it is one.
    """

    level: str
    sentence: str
    run_id: str | None = None


# -- runs ------------------------------------------------------------------------------------------


def past_runs(store: Store, wanted: Iterable[RunKey]) -> dict[RunKey, PastRun]:
    """Those of these runs that were accounted for, by one read each; many at a time.

    :raises StagingError: If the root cannot be read.
    """
    files = {f"{StagedRun(store, **key._asdict()).path}/{REPORT}": key for key in wanted}
    found: dict[RunKey, PastRun] = {}
    for path, text in store.folder("").read_all(list(files)):
        run = None if text is None else _past_run(files[path].run_id, text)
        if run is not None:
            found[files[path]] = run
    return found


def _past_run(run_id: str, text: str) -> PastRun | None:
    """A run by its report; ``None`` if that cannot be read: the run's own page says why."""
    try:
        report = json.loads(text)
        return _of_report(run_id, report)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _of_report(run_id: str, report: Mapping[str, Any]) -> PastRun:
    totals, generations = report["totals"], report["generations"]
    starts = [_instant(each["started_at"]) for each in generations if each["started_at"]]
    waits = [each["waited"] for each in generations if each.get("waited") is not None]
    started, ended = min(starts, default=None), _instant(report["at"])
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


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


# -- what is held ----------------------------------------------------------------------------------


def held_messages(store: Store, pipeline: str, dag_id: str, now: datetime) -> Held:
    """What unsettled executions of a pipeline hold in a Dag.

    :raises StagingError: If the root cannot be read, or a file of a run.
    """
    messages = receiving = 0
    late: list[str] = []
    run_ids: dict[str, None] = {}
    for run, record in iter_open(store, pipeline, dag_id):
        if record.state == SETTLED:
            continue
        run_ids[run.run_id] = None
        if record.state == OPENED:  # its task renews the lease by itself
            live = read_live(run.files, record.generation)
            receiving += 1
            messages += live.received if live is not None else 0
            continue
        path = paths.manifest(record.generation)
        try:
            received = Manifest.loads(run.files.read(path), path).received
        except FileNotFoundError:  # given back before it was published
            continue
        messages += received
        lease = run.lease(record)
        left = (lease.deadline - now).total_seconds()
        if received and left < _LATE_SHARE * lease.seconds:
            late.append(
                f"The lease on {many(received, 'message')} of the run {run.run_id}"
                + (f" lapses in {left:,.0f} s." if left > 0 else " has lapsed.")
            )
    return Held(messages=messages, receiving=receiving, late=tuple(late), run_ids=tuple(run_ids))


# -- what needs a look -----------------------------------------------------------------------------


def signs_of(runs: Sequence[PastRun], held: Held | None, failed: str | None = None) -> list[Sign]:
    """Why people should look at a pipeline, the gravest first; empty if they need not.

    :param runs: The last ones, the newest first; dry runs are passed over.
    :param failed: The newest run, if Airflow calls it failed.
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
    """What is remarkable in a run that went well."""
    signs = []
    if run.dead_lettered >= MANY_DEAD:
        letters = many(run.dead_lettered, "message")
        signs.append(Sign(WARN, f"{letters} of the last run became dead letters.", run.run_id))
    if run.failure_share is not None and run.failure_share >= MANY_FAILED:
        share = f"{run.failure_share:.0%} of the messages of the last run failed."
        signs.append(Sign(WARN, share, run.run_id))
    return signs


def waiting_signs(dead: int | None, oldest_age: float | None, as_of: str) -> list[Sign]:
    """Why people should look at what waits at the broker.

    :param as_of: When that was so, for people.
    """
    signs = []
    if dead is not None and dead >= MANY_DEAD:
        signs.append(Sign(WARN, f"{many(dead, 'dead letter')} lie at the broker (as of {as_of})."))
    if oldest_age is not None and oldest_age >= OLD_BACKLOG:
        hours = oldest_age / 3600.0
        text = f"The oldest message had waited for {hours:,.1f} h (as of {as_of})."
        signs.append(Sign(WARN, text))
    return signs
