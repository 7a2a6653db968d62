"""Tell people what happened in a run: in the log, as a metric, and by the notifiers given.

An alert is a file of its run before anybody is told of it, and that file says who has been told::

    alerts/<kind>.json              once for a run
    alerts/<kind>-<digest>.json     once for the executions that the digest is of

So a task that looks again, is tried again or is cleared tells nothing twice; and what it died while
telling, it tells at its next look.  Nothing here is ever in the way of settling.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Thread
from typing import Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.formats.layout import VERSION, paths, read_json
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.model.alerts import Alerts
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many, printable
from airflow_broadway.runs.account import kept_report
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.heartbeat import name_of
from airflow_broadway.runs.metrics import Metric, Metrics
from airflow_broadway.runs.ports import Ports, producer_env
from airflow_broadway.staging.retention import mark_balanced
from airflow_broadway.staging.run_folder import PUBLISHED, SETTLING, GenerationRecord, StagedRun

__all__ = ["Alert", "AlertKind", "Notify", "RunAlerts", "note_swept"]

log = logging.getLogger(__name__)

#: Seconds that the notifiers of one alert have together: leases wait to be renewed meanwhile.
TIMEOUT: Final = 20.0
#: How often a notifier that fails is called; and seconds in between, where nobody looks again.
TRIES: Final = 3
PAUSE: Final = 2.0
#: Reasons that an alert names: the most frequent.
SHOWN_REASONS: Final = 3

_FOLDER: Final = "alerts"
#: The runs that a sweep of this one has settled and accounted for.
_SWEPT: Final = "swept"


class AlertKind(StrEnum):
    """What may be told."""

    #: Messages of a run are in no class, or in two.
    UNBALANCED = "unbalanced"
    #: A lease is about to lapse, or messages had lapsed before they were settled.
    LEASE = "lease"
    #: Messages became dead letters.
    DEAD_LETTERS = "dead_letters"
    #: The oldest message that waits has waited for too long.
    BACKLOG_AGE = "backlog_age"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing to be told.

    :param message: One or two sentences; no payload is in it, and no secret.
    :param facts: The figures behind it, as JSON.
    :param at: When it was found, as ISO 8601 text in UTC.
    """

    kind: str
    pipeline: str
    dag_id: str
    run_id: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: str = ""

    def to_json(self) -> dict[str, Any]:
        """As notifiers get it."""
        return dataclasses.asdict(self)


#: Tells one person, or one channel, of an alert; may block, and may raise.
Notify = Callable[[Alert], object]


class _Found(NamedTuple):
    """What is to be told, and the generations that it is about; none: the run as a whole."""

    kind: AlertKind
    message: str
    facts: dict[str, Any]
    about: Sequence[str] = ()

    @property
    def name(self) -> str:
        if not self.about:
            return self.kind.value
        digest = hashlib.sha256(" ".join(sorted(self.about)).encode()).hexdigest()
        return f"{self.kind.value}-{digest[:12]}"


class RunAlerts:
    """Finds and tells the alerts of a run, for one task.

    :param bounds: When there is something to tell.
    :param notifiers: Who is told, by a name that stays the same.
    :param teller: The task.  What another of the run has begun to tell is left to it.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Pipeline,
        bounds: Alerts,
        notifiers: Mapping[str, Notify],
        *,
        ports: Ports,
        teller: str,
        clock: Clock | None = None,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._bounds = bounds
        self._notifiers = notifiers
        self._ports = ports
        self._teller = teller
        self._clock = clock or SystemClock()
        self._metrics = Metrics(ports.metrics, pipeline=pipeline.name, dag_id=run.dag_id)

    def look(
        self,
        records: Sequence[GenerationRecord] = (),
        report: Mapping[str, Any] | None = None,
        *,
        live: bool | None = None,
        last: bool = False,
    ) -> None:
        """Look once, and tell what is new.  Never raises: it comes after settling.

        :param records: The run's generations.
        :param report: The run's account, once there is one.
        :param live: Whether the run drains a queue; by default ``records`` say it.
        :param last: Nobody looks again: a notifier that fails is called again at once.
        """
        try:
            if live is None:
                live = bool(records) and all(_asks_broker(record) for record in records)
            for found in self._found(records, report, live=live):
                self._record(found)
            self._tell_all(last=last)
            if last:
                self._tell_swept()
        except Exception as error:
            unexpected = None if isinstance(error, OSError) else error
            log.warning("Could not tell of this run: %s", error, exc_info=unexpected)

    # -- what there is to tell -------------------------------------------------------------------

    def _found(
        self,
        records: Sequence[GenerationRecord],
        report: Mapping[str, Any] | None,
        *,
        live: bool,
    ) -> Iterator[_Found]:
        if report is not None:
            yield from _of_report(report, self._bounds)
        elif self._bounds.lease is not None:
            yield from self._short_leases(records, self._bounds.lease)
        if live and self._bounds.backlog_age is not None:
            yield from self._old_backlog(self._bounds.backlog_age)

    def _short_leases(self, records: Sequence[GenerationRecord], share: float) -> Iterator[_Found]:
        """Leases that nobody has renewed for long, of messages that wait to be settled.

        Until a manifest is published, its task renews its lease, and fails where it cannot.
        """
        short: list[tuple[float, GenerationRecord]] = []
        for record in records:
            if record.state in (PUBLISHED, SETTLING):
                lease = self._run.lease(record)
                left = (lease.deadline - self._clock.now()).total_seconds()
                if left < share * lease.seconds:
                    short.append((left, record))
        if short:
            left, record = min(short, key=lambda each: each[0])
            when = f"lapses in {left:,.0f} s" if left > 0 else f"has lapsed {-left:,.0f} s ago"
            others = f", and so do {many(len(short) - 1, 'other')}" if len(short) > 1 else ""
            yield _Found(
                AlertKind.LEASE,
                f"The lease of {name_of(record)} {when}{others}: it could not be renewed.  What"
                " lapses is delivered again, marked as redelivered.",
                {"left": round(left, 3), "leases": [each.generation for _, each in short]},
            )

    def _old_backlog(self, bound: float) -> Iterator[_Found]:
        if self._run.files.exists(_path(AlertKind.BACKLOG_AGE.value)):
            return  # told already: the broker need not be asked
        env = producer_env(self._pipeline, self._ports, store=self._run.store)
        try:
            depth = WatchedQueues.of(self._pipeline).depth(env)
        except Exception as error:
            log.warning("Could not ask how old the backlog is: %s", error)
            return
        if depth is None or depth.oldest_age is None or not depth.ready:
            return
        if depth.oldest_age >= bound:
            yield _Found(
                AlertKind.BACKLOG_AGE,
                f"{many(depth.ready, 'message')} {'waits' if depth.ready == 1 else 'wait'}, the"
                f" oldest since {depth.oldest_age:,.0f} s (backlog_age={bound:,g}).",
                dict(depth._asdict()),
            )

    # -- telling ---------------------------------------------------------------------------------

    def _record(self, found: _Found) -> None:
        """Have the alert stand in staging; one that stands there already is left as it is."""
        value: dict[str, Any] = {
            "kind": found.kind.value,
            "message": found.message,
            "facts": found.facts,
            "at": self._clock.now().isoformat(),
            "teller": self._teller,
            "tries": 0,
            "told": [],
            "version": VERSION,
        }
        new = self._run.files.create(_path(found.name), json.dumps(value, sort_keys=True))
        if new and not self._run.files.list(paths.GENERATIONS):
            mark_balanced(self._run)  # a run that received nothing: its files go in time

    def _tell_all(self, *, last: bool) -> None:
        for name in self._run.files.list(_FOLDER):
            while self._tell(f"{_FOLDER}/{name}") and last:
                self._clock.sleep(PAUSE)

    def _tell(self, path: str) -> bool:
        """Tell those who have not been told; whether somebody is to be told again.

        Who dies here tells again: rather twice than never.
        """
        value = read_json(self._run.files.read(path), path)
        waiting = {n: notify for n, notify in self._notifiers.items() if n not in value["told"]}
        tries: int = value["tries"]
        if value["teller"] != self._teller or (tries and not waiting) or tries >= TRIES:
            return False
        alert = self._alert(value)
        if not tries:
            log.warning("Alert: %s", alert.message)
            self._metrics.count(Metric.ALERTS, 1, alert=alert.kind)
        told = _notify(waiting, alert, self._clock)
        value |= {"tries": tries + 1, "told": [*value["told"], *told]}
        self._run.files.replace(path, json.dumps(value, sort_keys=True))
        return len(told) < len(waiting) and tries + 1 < TRIES

    def _alert(self, value: Mapping[str, Any]) -> Alert:
        return Alert(
            kind=value["kind"],
            pipeline=self._pipeline.name,
            dag_id=self._run.dag_id,
            run_id=self._run.run_id,
            message=f"{self._pipeline.name}: {value['message']}",
            facts=value["facts"],
            at=value["at"],
        )

    def _tell_swept(self) -> None:
        """Tell of runs that died before they could: a sweep of this one has accounted for them."""
        for name in self._run.files.list(_SWEPT):
            run_id = json.loads(self._run.files.read(f"{_SWEPT}/{name}"))["run_id"]
            self.look_at_swept(self._of(run_id))

    def look_at_swept(self, run: StagedRun) -> None:
        """Tell of a run that this one has settled and accounted for."""
        report = kept_report(run)
        if report is not None:
            other = RunAlerts(
                run,
                self._pipeline,
                self._bounds,
                self._notifiers,
                ports=self._ports,
                teller=self._teller,
                clock=self._clock,
            )
            other.look((), report, live=False, last=True)

    def _of(self, run_id: str) -> StagedRun:
        run = self._run
        return StagedRun(run.store, pipeline=run.pipeline, dag_id=run.dag_id, run_id=run_id)


def note_swept(run: StagedRun, swept: Iterable[StagedRun]) -> None:
    """Note which runs a sweep has accounted for: the task that tells the run's alerts is another.

    :raises StagingError: If it cannot be written.
    """
    for other in swept:
        name = other.path.rpartition("/")[2]
        run.files.replace(f"{_SWEPT}/{name}.json", json.dumps({"run_id": other.run_id}))


def _path(name: str) -> str:
    return f"{_FOLDER}/{name}.json"


def _asks_broker(record: GenerationRecord) -> bool:
    return RunSource.from_json(record.source).asks_broker


def _of_report(report: Mapping[str, Any], bounds: Alerts) -> Iterator[_Found]:
    """What the account of a run has to tell."""
    totals, generations = report["totals"], report["generations"]
    if not report["balanced"]:
        yield _Found(
            AlertKind.UNBALANCED,
            f"The sum of run {report['run_id']} does not balance: {totals['received']:,} received,"
            f" {totals['accounted']:,} accounted for.  See {report['path']}",
            dict(totals),
            [each["generation"] for each in generations if not each["balanced"]],
        )
    if bounds.lease is not None and totals["lapsed"]:
        yield _Found(
            AlertKind.LEASE,
            f"{many(totals['lapsed'], 'message')} of run {report['run_id']} had lapsed before they"
            " were settled: they are delivered again, marked as redelivered.",
            {"lapsed": totals["lapsed"]},
        )
    dead = totals["dead_lettered"]
    if bounds.dead_letters is not None and dead >= bounds.dead_letters:
        reasons = list(report["reasons"])[:SHOWN_REASONS]
        why = "; ".join(f"{each['count']:,} × {printable(each['reason'])}" for each in reasons)
        became = "became a dead letter" if dead == 1 else "became dead letters"
        yield _Found(
            AlertKind.DEAD_LETTERS,
            f"{many(dead, 'message')} of run {report['run_id']} {became}."
            + (f"  Why messages failed: {why}." if why else ""),
            {"dead_lettered": dead, "reasons": reasons},
            [each["generation"] for each in generations if each["dead_lettered"]],
        )


def _notify(notifiers: Mapping[str, Notify], alert: Alert, clock: Clock) -> list[str]:
    """Call each in a thread of its own; who has been told within ``TIMEOUT``.

    One that hangs is left behind: its thread ends with the process.
    """
    told: list[str] = []

    def call(name: str, notify: Notify) -> None:
        try:
            notify(alert)
            told.append(name)
        except Exception as error:
            log.warning("%s could not tell of %s: %s", name, alert.kind, redacted(str(error)))

    threads = {
        name: Thread(target=copy_context().run, args=(call, name, notify), daemon=True)
        for name, notify in notifiers.items()
    }
    for thread in threads.values():
        thread.start()
    until = clock.monotonic() + TIMEOUT
    for name, thread in threads.items():
        thread.join(max(0.0, until - clock.monotonic()))
        if thread.is_alive():
            log.warning("%s did not tell of %s within %g s.", name, alert.kind, TIMEOUT)
    return sorted(told)
