"""Settle the generations of one run, and account for every message of it."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody import Custodian, SettleReport
from airflow_broadway.core.errors import BroadwayError, StagingError
from airflow_broadway.core.manifest import paths
from airflow_broadway.operators._common import AirflowConnections, producer_env
from airflow_broadway.operators._metrics import Metric, Metrics
from airflow_broadway.staging.plans import counted_plans, outcomes_of, plans_of
from airflow_broadway.staging.retention import mark_balanced
from airflow_broadway.staging.run import SETTLED, SETTLING, GenerationRecord, StagedRun
from airflow_broadway.staging.settlement import (
    build_settlement,
    settle_generation,
    settled_journal,
)

log = logging.getLogger(__name__)

REPORT = "report.json"
_HOLD = "hold.json"

#: A heartbeat older than this many seconds means that no sensor looks: its Dag is paused, or it was
#: marked.  Longer than any poke interval and its rescheduling.
STALE_HEARTBEAT = 60.0


class RunSettler:
    """Renews, settles and accounts for the generations of a run; used from one thread.

    :param task_ids: The tasks whose generations count; ``None``: all of the run.
    :param generations: Of these, the ones that count; ``None``: all.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Broadway,
        *,
        task_ids: Sequence[str] | None = None,
        generations: Collection[str] | None = None,
        connections: AirflowConnections | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._task_ids = task_ids
        self._group = ",".join(sorted(task_ids or ()))
        self._only = generations
        self._connections = connections or AirflowConnections()
        self._clock = clock or SystemClock()
        self._custodian: Custodian | None = None
        self._metrics = Metrics(pipeline.name, run.dag_id)

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        if self._custodian is not None:
            self._custodian.close()
            self._custodian = None

    # -- the sensor's sign of life -------------------------------------------------------------

    def beat(self) -> None:
        """Note that a sensor looks after this run; without the note others stand in for it."""
        text = json.dumps({"at": self._clock.now().isoformat()})
        try:
            self._run.files.replace(paths.HEARTBEAT, text)
        except StagingError as error:
            log.warning("Could not leave a sign of life: %s", error)

    def watched(self) -> bool:
        """Whether a sensor looked lately."""
        try:
            at = json.loads(self._run.files.read(paths.HEARTBEAT))["at"]
        except FileNotFoundError:
            return False
        age = self._clock.now() - datetime.fromisoformat(at)
        return age.total_seconds() < STALE_HEARTBEAT

    def hold(self, seconds: float, failed: Sequence[str]) -> bool:
        """Whether open generations are still to be kept for people to mend what failed."""
        open_records = [each for each in self._generations() if each.state != SETTLED]
        if not seconds or not open_records:
            return False
        now = self._clock.now()
        holds = self._holds()
        since = datetime.fromisoformat(holds.get(self._group, now.isoformat()))
        if self._group not in holds:
            self._run.files.replace(_HOLD, json.dumps({**holds, self._group: now.isoformat()}))
        left = seconds - (now - since).total_seconds()
        if left > 0:
            log.warning(
                "Tasks %s failed. The messages of %d generations are held for %.0f s more: mend the"
                " cause and clear these tasks; then everything is given back.",
                list(failed),
                len(open_records),
                left,
            )
        return left > 0

    def end_hold(self) -> None:
        """Forget since when the run is held: nothing keeps it waiting now."""
        try:
            holds = self._holds()
            if holds.pop(self._group, None) is not None:
                self._run.files.replace(_HOLD, json.dumps(holds))
        except StagingError as error:
            log.warning("Could not forget a hold: %s", error)

    def _holds(self) -> dict[str, str]:
        """Since when each task group of the run is held."""
        try:
            held: dict[str, str] = json.loads(self._run.files.read(_HOLD))
        except FileNotFoundError:
            return {}
        return held

    # -- settling ------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the lease of each generation that waits for its outcomes.

        What cannot be renewed now is told, and tried again at the next look.
        """
        if not self._pipeline.producer.renews:
            return
        try:
            records = self._generations()
        except StagingError as error:
            log.warning("Could not look for leases to renew: %s", error)
            return
        for record in records:
            # Until its manifest is published, a process task renews its lease itself.
            if record.published:
                try:
                    self._renew(record.generation)
                except BroadwayError as error:
                    # A lease outlasts several looks; failing would use up the sensor's retries.
                    log.warning(
                        "Could not renew the lease of generation %s yet: %s",
                        record.generation,
                        error,
                    )

    def _renew(self, generation: str) -> None:
        held = self._open().renew(self._run.lease(generation))
        if held is None:
            log.error(
                "The lease of generation %s has lapsed: its broker gives these messages to the next"
                " run, marked as redelivered.",
                generation,
            )
            return
        self._run.put_lease(held)
        left = (held.deadline - self._clock.now()).total_seconds()
        self._metrics.gauge(Metric.LEASE_REMAINING, left)

    def settle(self, *, final: bool) -> None:
        """Settle each generation whose messages all have an outcome.

        :param final: Settle the others too: what has no outcome is released.
        :raises BroadwayError: The first of those that kept a generation unsettled; the others are
            settled all the same.
        """
        first: BroadwayError | None = None
        for record in self._generations():
            if record.state == SETTLED:
                continue
            try:
                self._settle(record, final=final)
            except BroadwayError as error:
                log.error("Could not settle generation %s of %s: %s", *_about(record), error)
                first = first or error
        if first is not None:
            raise first

    def _settle(self, record: GenerationRecord, *, final: bool) -> None:
        plans = plans_of(self._run, self._pipeline, record.generation)
        settlement, complete, progress = build_settlement(
            self._run, record.generation, self._pipeline, plans, final=final
        )
        # What somebody began to settle is finished whatever the outcomes: no more will come.
        if complete or final or record.state == SETTLING:
            report = settle_generation(
                self._run, record, self._open(), settlement, progress=progress
            )
            log.info("Settled generation %s of %s: %s.", *_about(record), report)
            self._metrics.settled(report + progress.settled_now)

    def custodian(self) -> Custodian:
        """A custodian of this run's messages; a generation is named by its lease."""
        custodian: Custodian = self._pipeline.producer.custodian(
            producer_env(
                self._pipeline,
                generation="",
                owner={"dag_id": self._run.dag_id, "run_id": self._run.run_id},
                store=self._run.store,
                connections=self._connections,
                clock=self._clock,
            )
        )
        return custodian

    def _open(self) -> Custodian:
        if self._custodian is None:
            self._custodian = self.custodian()
        return self._custodian

    def _generations(self) -> list[GenerationRecord]:
        found = self._run.generations(self._task_ids)
        return [each for each in found if self._only is None or each.generation in self._only]

    # -- accounting ----------------------------------------------------------------------------

    def report(self, *, failed_tasks: Sequence[str]) -> dict[str, Any]:
        """Account for every message of every execution, and keep it as ``report.json``."""
        generations = [self._account(record) for record in self._generations()]
        counts = Counter[str]()
        for each in generations:
            counts.update({k: v for k, v in each.items() if isinstance(v, int)})
        totals = {
            name: counts[name]
            for name in (
                "received",
                "failed",
                "acked",
                "requeued",
                "dead_lettered",
                "left",
                "released",
                "lapsed",
                "settle_failed",
                "still_leased",
                "accounted",
            )
        }
        report = {
            "pipeline": self._pipeline.name,
            "dag_id": self._run.dag_id,
            "run_id": self._run.run_id,
            "path": f"{self._run.store.uri}/{self._run.path}/{REPORT}",
            "totals": totals,
            "balanced": all(each["balanced"] for each in generations),
            "generations": generations,
            "batchers": self._batchers(),
            "failed_tasks": list(failed_tasks),
            "errors": sorted({error for each in generations for error in each["errors"]}),
            "at": self._clock.now().isoformat(),
        }
        if not self._run.files.exists(REPORT):
            self._tell_batches()
        self._run.files.replace(REPORT, json.dumps(report, indent=1, sort_keys=True))
        if report["balanced"]:
            mark_balanced(self._run)
        return report

    def _tell_batches(self) -> None:
        """Send the metrics of the run's batches."""
        for batcher in self._pipeline.batchers:
            for plan in counted_plans(self._run, batcher):
                for planned, outcome in outcomes_of(self._run, plan):
                    if outcome is not None:
                        tags = {"batcher": batcher, "trigger": planned.trigger}
                        self._metrics.count(Metric.BATCHES, 1, **tags)
                        self._metrics.gauge(Metric.BATCH_SIZE, planned.size, batcher=batcher)
                        self._metrics.seconds(
                            Metric.BATCH_DURATION, outcome.seconds, batcher=batcher
                        )

    def _account(self, record: GenerationRecord) -> dict[str, Any]:
        manifest = self._run.manifest(record.generation)
        journal = settled_journal(self._run, record.generation)
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
            "failed": manifest.failed if manifest else 0,
            "acked": report.acked,
            "requeued": report.requeued,
            "dead_lettered": report.dead_lettered,
            "left": report.left,
            "released": report.released,
            "lapsed": report.lapsed,
            "settle_failed": report.failed,
            "still_leased": still_leased,
            "accounted": accounted,
            "balanced": accounted == received and not still_leased,
            "stopped": manifest.stopped if manifest else "",
            "started_at": manifest.started_at if manifest else "",
            "ended_at": manifest.ended_at if manifest else "",
            "errors": list(report.errors),
        }

    def _batchers(self) -> dict[str, Any]:
        """Batches by trigger and outcome, for each batcher."""
        made: dict[str, Any] = {}
        for name in self._pipeline.batchers:
            counts = Counter[str](messages=0, batches=0, successful=0, failed=0, failed_batches=0)
            triggers = Counter[str]()
            seconds = 0.0
            for plan in counted_plans(self._run, name):
                counts["messages"] += plan.messages
                counts["batches"] += plan.batches
                triggers.update(plan.triggers)
                for _, outcome in outcomes_of(self._run, plan):
                    if outcome is not None:
                        counts["successful"] += outcome.successful
                        counts["failed"] += outcome.failed
                        counts["failed_batches"] += bool(outcome.error)
                        seconds += outcome.seconds
            made[name] = {**counts, "triggers": dict(triggers), "seconds": round(seconds, 3)}
        return made


def _about(record: GenerationRecord) -> tuple[str, str]:
    index = "" if record.map_index < 0 else f"[{record.map_index}]"
    return record.generation, f"{record.task_id}{index}"
