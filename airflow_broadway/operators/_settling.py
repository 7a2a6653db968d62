"""Settle the generations of one run, and account for every message of it."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody import RELEASE, Custodian, Settlement, SettleReport
from airflow_broadway.core.manifest import Manifest, paths
from airflow_broadway.operators._common import AirflowConnections, producer_env
from airflow_broadway.staging.run import GenerationRecord, StagedRun
from airflow_broadway.staging.settlement import build_settlement, plans_of, settle_generation

log = logging.getLogger(__name__)

REPORT = "report.json"
_HOLD = "hold.json"

#: A heartbeat older than this many seconds means that no sensor looks: its Dag is paused, or it was
#: marked.  Longer than any poke interval and its rescheduling.
STALE_HEARTBEAT = 60.0


class RunSettler:
    """Renews, settles and accounts for the generations of a run; used from one thread.

    :param task_ids: The tasks whose generations count; ``None``: all of the run.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Broadway,
        *,
        task_ids: Sequence[str] | None = None,
        connections: AirflowConnections | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._task_ids = task_ids
        self._connections = connections or AirflowConnections()
        self._clock = clock or SystemClock()
        self._custodian: Custodian | None = None

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        if self._custodian is not None:
            self._custodian.close()
            self._custodian = None

    # -- the sensor's sign of life -------------------------------------------------------------

    def beat(self) -> None:
        """Note that a sensor looks after this run."""
        text = json.dumps({"at": self._clock.now().isoformat()})
        self._run.files.replace(paths.HEARTBEAT, text)

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
        open_records = [r for r in self._generations() if not r.settled]
        if not seconds or not open_records:
            return False
        now = self._clock.now()
        try:
            since = datetime.fromisoformat(json.loads(self._run.files.read(_HOLD))["since"])
        except FileNotFoundError:
            since = now
            self._run.files.replace(_HOLD, json.dumps({"since": now.isoformat()}))
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

    # -- settling ------------------------------------------------------------------------------

    def look(self, *, final: bool) -> None:
        """Settle each generation whose messages all have an outcome, and renew the others.

        :param final: Settle all: what has no outcome is released.
        """
        for record in self._generations():
            if not record.settled:
                self._look_at(record, final)

    def _look_at(self, record: GenerationRecord, final: bool) -> None:
        custodian = self._open(record)
        if not record.published:
            # Its process task renews the lease itself while it runs; a dead one waits for its
            # retry, which gives its messages back, or for the end of the run.
            if final:
                self._settle(record, custodian, Settlement(rest=RELEASE))
            return
        built = build_settlement(self._run, record, self._pipeline)
        if built.complete or final:
            self._settle(record, custodian, built.settlement)
            return
        held = custodian.renew(self._run.lease(record.generation))
        if held is None:
            log.error(
                "The lease of generation %s has lapsed: its broker gives these messages to the next"
                " run, marked as redelivered.",
                record.generation,
            )
            self._settle(record, custodian, built.settlement)
        else:
            self._run.put_lease(held)

    def _settle(
        self, record: GenerationRecord, custodian: Custodian, settlement: Settlement
    ) -> None:
        report = settle_generation(self._run, record, custodian, settlement)
        log.info("Settled generation %s (%s): %s.", record.generation, record.task_id, report)

    def _open(self, record: GenerationRecord) -> Custodian:
        if self._custodian is None:
            self._custodian = self._pipeline.producer.custodian(
                producer_env(
                    self._pipeline,
                    generation=record.generation,
                    owner=record.lease["owner"],
                    store=self._run.store,
                    connections=self._connections,
                    clock=self._clock,
                )
            )
        return self._custodian

    def _generations(self) -> list[GenerationRecord]:
        return self._run.generations(self._task_ids)

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
            "path": self._run.path_of(REPORT),
            "totals": totals,
            "balanced": all(each["balanced"] for each in generations),
            "generations": generations,
            "batchers": self._batchers(),
            "failed_tasks": list(failed_tasks),
            "errors": sorted({error for each in generations for error in each["errors"]}),
            "at": self._clock.now().isoformat(),
        }
        self._run.files.replace(REPORT, json.dumps(report, indent=1, sort_keys=True))
        return report

    def _account(self, record: GenerationRecord) -> dict[str, Any]:
        manifest = self._manifest(record)
        report = record.report or SettleReport()
        at_once = SettleReport.from_json(manifest.settled_now) if manifest else SettleReport()
        whole = report + at_once
        received = manifest.received if manifest else whole.total
        still_leased = 0 if record.settled else received - at_once.total
        accounted = whole.total + still_leased
        return {
            "generation": record.generation,
            "task_id": record.task_id,
            "map_index": record.map_index,
            "try_number": record.try_number,
            "published": manifest is not None,
            "received": received,
            "failed": (manifest.failed if manifest else 0),
            "acked": whole.acked,
            "requeued": whole.requeued,
            "dead_lettered": whole.dead_lettered,
            "left": whole.left,
            "released": whole.released,
            "lapsed": whole.lapsed,
            "settle_failed": whole.failed,
            "still_leased": still_leased,
            "accounted": accounted,
            "balanced": accounted == received and not still_leased,
            "stopped": manifest.stopped if manifest else "",
            "seconds": manifest.seconds if manifest else {},
            "errors": list(whole.errors),
        }

    def _manifest(self, record: GenerationRecord) -> Manifest | None:
        return self._run.manifest(record.generation) if record.published else None

    def _batchers(self) -> dict[str, Any]:
        """Batches by trigger and outcome, for each batcher."""
        made: dict[str, Any] = {}
        for name in self._pipeline.batchers:
            plans = plans_of(self._run, name)
            counts = Counter[str]()
            triggers = Counter[str]()
            seconds = 0.0
            for plan in plans:
                triggers.update(plan.triggers)
                counts["messages"] += plan.messages
                counts["batches"] += plan.batches
                for outcome in self._run.outcomes(plan):
                    counts["outcomes"] += 1
                    counts["successful"] += outcome.successful
                    counts["failed"] += outcome.failed
                    counts["failed_batches"] += bool(outcome.error)
                    seconds += outcome.seconds
            made[name] = {**counts, "triggers": dict(triggers), "seconds": round(seconds, 3)}
        return made
