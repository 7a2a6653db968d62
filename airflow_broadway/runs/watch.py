"""Watches a run: renews its leases, settles it once all outcomes are known, and accounts for it.

Used by the ack sensor at each poke, and by tasks that stand in for an inactive sensor: see
:meth:`RunWatcher.standing_in`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from typing import Any

from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.custody.protocol import Custodian, Lease
from airflow_broadway.core.custody.run_summary import settled_line
from airflow_broadway.core.errors import BroadwayError, StagingError
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.account import (
    LOOK,
    REPORT,
    batchers_of,
    isolation_of,
    keep_report,
    kept_report,
    unseen,
)
from airflow_broadway.runs.heartbeat import Heartbeat, Hold, name_of
from airflow_broadway.runs.metrics import Metric, Metrics
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.reading.reasons import count_reasons
from airflow_broadway.runs.settle import settle, settle_if_complete
from airflow_broadway.runs.sources.pipelines import Custodians, pipeline_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.retention import mark_balanced
from airflow_broadway.staging.run_folder import SETTLED, GenerationRecord, StagedRun

log = logging.getLogger(__name__)


@dataclass
class RunWatcher:
    """Renews, settles and accounts for the generations of a run; used from one thread.

    :param task_ids: The tasks whose generations are included; ``None`` for all of the run.
    :param generations: The generations among these that are included; ``None`` for all.
    """

    staged: StagedRun
    pipeline: Pipeline
    _: KW_ONLY
    task_ids: Sequence[str] | None = None
    generations: Collection[str] | None = None
    ports: Ports = field(default_factory=Ports)

    def __post_init__(self) -> None:
        clock = self.staged.clock
        self.heartbeat = Heartbeat(self.staged, clock)
        self._hold = Hold(self.staged, ",".join(sorted(self.task_ids or ())), clock)
        self._custodians = self.custodians()
        self._recorded = Recorded(self.staged)
        #: The generations by the last settlement.
        self._records: list[GenerationRecord] | None = None
        self._metrics = Metrics(
            self.ports.metrics, pipeline=self.pipeline.name, dag_id=self.staged.dag_id
        )

    def close(self) -> None:
        """Releases connections; idempotent."""
        self._custodians.close()

    def look(
        self,
        *,
        over: bool,
        failed: Sequence[str] = (),
        processed: Sequence[Mapping[str, Any]] = (),
        last: bool = False,
        hold_failed: float = 0.0,
        again: float = 0.0,
    ) -> dict[str, Any] | None:
        """Performs one poke: renews leases, or settles everything and accounts for the run.

        :param over: Whether all watched tasks have finished.
        :param failed: The tasks among them that failed.
        :param processed: The references of the process tasks, once all have finished.
        :param last: Whether this is the last poke: settles even if tasks are running or messages
            are on hold.
        :param hold_failed: Seconds for which messages of failed tasks are kept.
        :param again: Seconds until the next poke, if it may be later than usual.
        :returns: The run's report; ``None`` to poke again.
        :raises BroadwayError: If a generation could not be settled; poke again.
        """
        if not over:  # afterwards no task reads it
            self.heartbeat.beat(again)
        waits = not over
        if over and failed:
            waits = self._hold.is_on(hold_failed, failed, self._unsettled())
        elif not over and not last and hold_failed:
            self._hold.end()
        if waits and not last:
            self.renew()
            return None
        self.settle(final=True, over=over)
        return self.report(failed_tasks=failed, processed=processed) if over else None

    def renew(self) -> None:
        """Renews the lease of each generation that waits for outcomes.

        A failure is logged and retried at the next poke.
        """
        try:
            records = self._generations()
        except StagingError as error:
            log.warning("Could not read the leases to renew: %s", error)
            return
        for record in records:
            # Until it publishes its manifest, a process task renews its own lease.
            if not record.published or not self._renews(record):
                continue
            try:
                lease = self._custodians.of(record).renew(self.staged.lease(record.generation))
                if lease is None:
                    log.error(
                        "The lease of generation %s has lapsed: its broker redelivers these"
                        " messages to the next run.",
                        record.generation,
                    )
                    continue
                self.staged.put_lease(lease)
                left = (lease.deadline - self.staged.clock.now()).total_seconds()
                self._metrics.gauge(Metric.LEASE_REMAINING, left)
            except BroadwayError as error:
                # A lease outlasts several pokes; failing would use up the sensor's retries.
                log.warning(
                    "Could not renew the lease of generation %s yet: %s", record.generation, error
                )

    def _renews(self, record: GenerationRecord) -> bool:
        return bool(pipeline_of(self.pipeline, record).producer.renews)

    def settle(self, *, final: bool, over: bool = False) -> None:
        """Settles each generation whose messages all have an outcome.

        :param final: Whether to settle the others too and release messages without an outcome.
        :param over: Whether no task is running any more: see :func:`settle`.
        :raises BroadwayError: The first error that left a generation unsettled; the others are
            settled nevertheless.
        """
        first: BroadwayError | None = None
        self._recorded = Recorded(self.staged)
        self._records = self._generations()
        records = [record for record in self._records if record.state != SETTLED]
        with self._renewing(records) as renewing:
            for record in records:
                with log_ids(generation=record.generation):
                    try:
                        if self._settle(record, renewing, final=final, over=over):
                            place = self._records.index(record)
                            self._records[place] = replace(record, state=SETTLED)
                    except BroadwayError as error:
                        log.error(
                            "Could not settle generation %s of %s: %s",
                            record.generation,
                            name_of(record),
                            error,
                        )
                        first = first or error
        if first is not None:
            raise first

    def _settle(
        self, record: GenerationRecord, renewing: _Renewing, *, final: bool, over: bool
    ) -> bool:
        """Settles a generation if it is complete or ``final``; returns whether it is settled."""

        def custodian(record: GenerationRecord) -> Custodian:
            renewing.leave(record.generation)
            return self._custodians.of(record)

        operation = partial(settle, over=over) if final else settle_if_complete
        settled = operation(
            self.staged,
            record,
            self.pipeline,
            custodian,
            connections=self.ports.connections,
            recorded=self._recorded,
        )
        if settled is not None:
            log.info(
                "Settled generation %s of %s.  %s",
                record.generation,
                name_of(record),
                settled_line(settled.report),
            )
            self._metrics.settled(settled.report + settled.settled_now)
        return settled is not None

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Renews leases while no sensor is active; at the end, settles complete generations.

        A sensor in reschedule mode is not scheduled while its Dag is paused, and its state may have
        been set by hand.  Running tasks continue nevertheless, and the task that records outcomes
        may settle them.
        """
        try:
            with self._renewing(self._unsettled(), at_once=True, unless=self.heartbeat.is_fresh):
                yield
        finally:
            self.settle_unwatched()

    def settle_unwatched(self) -> None:
        """Settles complete generations unless there is an active sensor; closes the watcher."""
        try:
            if not self.heartbeat.is_fresh():
                log.info("No ack sensor has looked after this run lately: settling here.")
                self.settle(final=False)
        except (BroadwayError, OSError) as error:
            # The outcomes are recorded; the sensor or the next run's sweep settles by them.
            log.error("Could not settle here: %s", error)
        finally:
            self.close()

    @contextmanager
    def _renewing(
        self,
        records: Sequence[GenerationRecord],
        *,
        at_once: bool = False,
        unless: Callable[[], bool] = lambda: False,
    ) -> Iterator[_Renewing]:
        """Renews the leases of generations that are not settled yet, in the background.

        Reading ten thousand outcomes takes a while, and so may a broker.

        :param at_once: Whether to renew immediately.
        :param unless: Returns whether a sensor renews them.
        """
        renewing = _Renewing(self.custodians(), records)
        leases: list[Lease] = []
        for record in records:
            if record.published and self._renews(record):
                try:
                    leases.append(self.staged.lease(record))
                except StagingError as error:
                    log.warning(
                        "The lease of %s of %s is not renewed: %s",
                        record.generation,
                        name_of(record),
                        error,
                    )
        if not leases:
            yield renewing
            return

        def held() -> list[Lease]:
            return [lease for lease in leases if lease.generation not in renewing.left]

        with LeaseRenewer(
            lambda: renewing,
            min(lease.seconds for lease in leases),
            lambda: [] if unless() else held(),
            renewed=self.staged.put_lease,
            at_once=at_once,
        ):
            yield renewing

    def custodians(self) -> Custodians:
        """Returns custodians of this run's messages, for one thread."""
        owner = {"dag_id": self.staged.dag_id, "run_id": self.staged.run_id}
        return Custodians(self.pipeline, self.ports, self.staged, owner)

    def _unsettled(self) -> list[GenerationRecord]:
        return [record for record in self._generations() if record.state != SETTLED]

    def _generations(self) -> list[GenerationRecord]:
        records = self.staged.generations(self.task_ids)
        return [
            record
            for record in records
            if (self.generations is None or record.generation in self.generations)
            # Another Airflow settles its own generations: its tasks may be running.
            and (record.state == SETTLED or not self.staged.is_foreign(record))
        ]

    # -- accounting ----------------------------------------------------------------------------

    def report(
        self, *, failed_tasks: Sequence[str], processed: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Accounts for every message of every execution and writes ``report.json``.

        :param processed: The references of the process tasks.  Messages in them that this staging
            folder lacks are ``unseen`` in the report, which then does not balance.
        """
        # Outcomes recorded after the settlement do not count.
        recorded, run = self._recorded, self.staged
        records = self._generations() if self._records is None else self._records
        look = None if records else kept_report(run, LOOK)
        missing = unseen(run, processed, settles_itself=not self.pipeline.batchers)
        before = None if records or look or missing else kept_report(run)
        if before is not None:  # the report of an empty run, whose files are removed
            if before["balanced"]:
                mark_balanced(run)  # its writer may have died before marking it
            return {**before, "failed_tasks": list(failed_tasks)}
        planned = any(recorded.counted(batcher) for batcher in self.pipeline.batchers)
        if planned and not run.files.exists(REPORT):
            self._count_batches(recorded)
        return keep_report(
            run,
            records,
            isolation=isolation_of(recorded, self.pipeline.batchers),
            batchers=batchers_of(recorded, self.pipeline.batchers),
            reasons=[
                asdict(reason)
                for reason in count_reasons(recorded, records, self.pipeline.batchers)
            ],
            failed_tasks=failed_tasks,
            at=self.staged.clock.now(),
            look=look,
            missing=missing,
            empty={row["generation"]: row for row in processed if "receives" in row},
        )

    def _count_batches(self, recorded: Recorded) -> None:
        """Sends the metrics of the run's batches."""
        for batcher in self.pipeline.batchers:
            for plan in recorded.counted(batcher):
                for planned, outcome in recorded.outcomes(plan):
                    if outcome is not None:
                        self._metrics.count(Metric.FAILED, outcome.failed, batcher=batcher)
                        tags = {"batcher": batcher, "trigger": planned.trigger}
                        self._metrics.count(Metric.BATCHES, 1, **tags)
                        self._metrics.gauge(Metric.BATCH_SIZE, planned.size, batcher=batcher)
                        self._metrics.seconds(
                            Metric.BATCH_DURATION, outcome.seconds, batcher=batcher
                        )


class _Renewing:
    """Renews leases in a thread, except those of generations that are being settled.

    :param custodians: Those of the renewing thread, which alone uses them.
    """

    def __init__(self, custodians: Custodians, records: Sequence[GenerationRecord]) -> None:
        self._custodians = custodians
        self._records = {record.generation: record for record in records}
        self._lock = threading.Lock()
        #: Generations settled or being settled.
        self.left: set[str] = set()

    def leave(self, generation: str) -> None:
        """Excludes a generation from renewal; returns when no renewal is in progress."""
        with self._lock:
            self.left.add(generation)

    def renew(self, lease: Lease) -> Lease | None:
        with self._lock:
            if lease.generation in self.left:
                return lease
            return self._custodians.of(self._records[lease.generation]).renew(lease)

    def close(self) -> None:
        self._custodians.close()
