"""Settles a generation: each message at its broker, by its recorded outcome.

The sensor, process tasks, sweeps and the sensor's stand-in all use this module.  The verdict of a
message is decided in :mod:`airflow_broadway.staging.settling.settlement`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from airflow_broadway.core.custody.protocol import Custodian, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.layout import read_json
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.model.connections import Connections, NoConnections
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.sinks import deletes_rows, resolve, rule_out_deletion
from airflow_broadway.runs.sources.pipelines import pipeline_of
from airflow_broadway.staging.applied import claims_of, note_applied
from airflow_broadway.staging.crash_records import record_crash
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import OPENED, SETTLING, GenerationRecord, StagedRun
from airflow_broadway.staging.settling.journal import Progress, settled_journal
from airflow_broadway.staging.settling.settlement import (
    applied_messages,
    begin_settlement,
    build_settlement,
    settle_generation,
)

log = logging.getLogger(__name__)


class Settled(NamedTuple):
    """The result of settling a generation.

    :param report: The report of this settlement.
    :param settled_now: The report of immediate settlements by callbacks before.
    """

    report: SettleReport
    settled_now: SettleReport


#: Opens the custodian of a generation's messages.
OpenCustodian = Callable[[GenerationRecord], Custodian]
#: A settlement, whether every message has an outcome, and the counts.
Decided = tuple[Settlement, bool, Progress]


def settle(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    custodian: OpenCustodian,
    *,
    void: bool = False,
    over: bool = False,
    own: bool = False,
    release_damaged: bool = False,
    batchers: Collection[str] | None = None,
    connections: Connections | None = None,
    recorded: Recorded | None = None,
) -> Settled:
    """Settles one generation at its broker by its recorded outcomes and releases the rest.

    Idempotent, also when called concurrently: the first report is final.

    Batches of a batcher with a sink are resolved first: see :mod:`airflow_broadway.runs.sinks`.

    :param custodian: Opens the custodian; called once the settlement is decided.
    :param void: Whether to ignore recorded outcomes and release everything that callbacks did not
        settle immediately; except outcomes of batchers with a sink, whose rows are committed.
    :param over: Whether no process of the run is running any more.  Then a crash is recorded if a
        whole task died at batches without an outcome.
    :param own: Whether the caller is the process that received the messages.  Otherwise the task of
        a generation without a manifest has died.
    :param release_damaged: Whether to release everything if a file is damaged, since the failed
        messages are then unknown.
    :param batchers: Batchers that may hold messages of it; default: all of the pipeline.
    :param connections: Resolves the connections of sinks.
    :param recorded: A reader of the run with what it has already read.
    :raises StagingDamaged: If a file is damaged.
    :raises BroadwayError: If staging, a sink or the broker fails; the generation remains unsettled.
    """
    settling = _Settling(run, record, pipeline, batchers, connections, recorded)
    try:
        settlement, complete, progress = settling.resolve(void=void)
        if over and not complete:
            settling.record_interruption()
    except StagingDamaged as error:
        if not release_damaged:
            raise
        log.error("All of generation %s is released: %s", record.generation, error)
        settlement, progress = Settlement(rest=RELEASE, damaged=True), Progress()
    if settlement.expected is None and not settlement.damaged and not own:
        settling.record_crash()
    return settling.carry_out(custodian, settlement, progress)


def settle_if_complete(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    custodian: OpenCustodian,
    *,
    connections: Connections | None = None,
    recorded: Recorded | None = None,
) -> Settled | None:
    """Settles a generation once each message has an outcome; returns ``None`` before that.

    A settlement that has begun is completed in any case, since no outcome can follow.
    """
    if record.state == SETTLING:
        return settle(run, record, pipeline, custodian, connections=connections, recorded=recorded)
    settling = _Settling(run, record, pipeline, None, connections, recorded)
    settlement, complete, progress = settling.decide(final=False)
    return settling.carry_out(custodian, settlement, progress) if complete else None


class _Settling:
    """One generation that is being settled; the parameters are those of :func:`settle`."""

    def __init__(
        self,
        run: StagedRun,
        record: GenerationRecord,
        pipeline: Pipeline,
        batchers: Collection[str] | None,
        connections: Connections | None,
        recorded: Recorded | None,
    ) -> None:
        self._run, self._record, self._pipeline = run, record, pipeline
        self._batchers = list(pipeline.batchers if batchers is None else batchers)
        self._connections = connections or NoConnections()
        self._recorded = recorded or Recorded(run)
        #: The pipeline with the producer that delivered the messages.
        self._served = pipeline_of(pipeline, record)
        #: The plans that decide about the messages.
        self._plans: list[BatchPlan] = []
        #: The batchers whose outcomes count; ``None``: all, and the process task's.
        self._only: Collection[str] | None = None

    # -- the verdicts ----------------------------------------------------------------------------

    def decide(self, *, final: bool, batches: Collection[str] | None = None) -> Decided:
        """Decides the verdicts by the recorded outcomes: see :func:`build_settlement`."""
        generation, recorded = self._record.generation, self._recorded
        self._plans = recorded.deciding(self._batchers, generation)
        return build_settlement(
            self._run,
            generation,
            self._served,
            self._plans,
            final=final,
            only=self._only,
            recorded=recorded,
            batches=batches,
        )

    def resolve(self, *, void: bool) -> Decided:
        """Decides the verdicts, once the batches in doubt are resolved.

        :param void: As for :func:`settle`.
        """
        run, record, pipeline = self._run, self._record, self._pipeline
        sinks = self._sinks
        self._only = sinks if void else None
        self._check_removed_batchers()
        decided = self.decide(final=not void)
        if decided[1] or not (sinks or deletes_rows(pipeline, record)):
            return decided
        # From the intent on no try begins a commit; those begun before are ruled out.
        begin_settlement(run, record, decided[0])
        self._recorded.forget_outcomes()  # there may be more plans, batches and outcomes since
        connections, recorded = self._connections, self._recorded
        resolve(run, pipeline, record.generation, connections, sinks, recorded=recorded)
        rule_out_deletion(pipeline, record, connections)
        return self.decide(final=not void)

    @cached_property
    def _sinks(self) -> list[str]:
        """The batchers that have a sink, or had one when a plan was written."""
        return [
            name
            for name in self._batchers
            if self._pipeline.batchers[name].sink is not None
            or any(plan.sink is not None for plan in self._recorded.plans(name))
        ]

    def _check_removed_batchers(self) -> None:
        """Checks that no batcher with a sink was removed or renamed: its outcomes would not count.

        :raises SinkError: If one was.
        """
        generation = self._record.generation
        manifest = self._run.manifest(generation)
        for name in (manifest.batchers if manifest else {}).keys() - self._pipeline.batchers.keys():
            for plan in self._recorded.plans(name):
                if plan.sink is not None and generation in plan.generations:
                    plan.check_sink(None)

    # -- crashes ---------------------------------------------------------------------------------

    def record_crash(self) -> None:
        """Records that a process task died before it published its manifest.

        Called before its messages are released; otherwise a message that crashes every process
        could remain undetected.

        :raises StagingError: If the record cannot be written.
        """
        run, record = self._run, self._record
        if record.state != OPENED:  # it was releasing normally, or its crash is on record
            return
        path = paths.in_hand(record.generation)
        in_hand: list[str] = []
        try:
            in_hand = read_json(run.files.read(path), path)["ids"]
        except FileNotFoundError:
            pass
        except (StagingDamaged, KeyError) as error:  # its host died as well
            log.warning("The messages in hand are unknown: %s", error)
        record_crash(run.store, run.pipeline, record.generation, in_hand, run.clock.now())

    def record_interruption(self) -> None:
        """Records a crash if a whole task died at batches of a generation that have no outcome.

        Called before the settlement, after which the messages may be redelivered.
        """
        from airflow_broadway.staging.isolation import in_hand_at_interruptions  # loads pyarrow

        run, generation = self._run, self._record.generation
        try:
            hand = in_hand_at_interruptions(self._recorded, generation, self._plans)
            if hand is not None:
                now = run.clock.now()
                record_crash(
                    run.store, run.pipeline, generation, hand.messages, now, alone=hand.alone
                )
        except StagingError as error:  # nothing is lost: the next run only isolates less
            log.warning("No crash is recorded of batches of generation %s: %s", generation, error)

    # -- the settlement --------------------------------------------------------------------------

    def carry_out(
        self, custodian: OpenCustodian, settlement: Settlement, progress: Progress
    ) -> Settled:
        """Settles the messages at their broker, after the rows of dead letters are committed.

        :raises SinkError: If the dead-letter table cannot be written; nothing is settled then.
        """
        run, record = self._run, self._record
        sinks = [] if settlement.damaged else self._sinks
        settlement = self._commit_dead_letters(settlement)

        def between(report: SettleReport) -> None:
            if sinks:
                self._index(report, sinks)
            self._archive(report, damaged=settlement.damaged)

        report = settle_generation(
            run, record, custodian(record), settlement, progress=progress, between=between
        )
        return Settled(report, progress.settled_now)

    def _commit_dead_letters(self, settlement: Settlement) -> Settlement:
        """Commits the rows of a settlement's dead letters; returns the settlement that they belong
        to.

        That is another one if a settlement begun before knew other outcomes.

        :raises SinkError: If the table cannot be written; the generation remains unsettled.
        """
        run, record, pipeline = self._run, self._record, self._served
        if pipeline.dead_letter_table is None or next(settlement.dead_letters(), None) is None:
            return settlement
        # It loads pyarrow.
        from airflow_broadway.runs.dead_letter_table import commit_rows_of, fix_decision

        begun = begin_settlement(run, record, settlement)
        if not begun and settled_journal(run, record.generation) is not None:
            return settlement
        decision = fix_decision(run, record, settlement, self._only)
        if not decision.own:
            self._recorded.forget_outcomes()
            self._only = decision.only
            settlement, _, _ = self.decide(final=False, batches=decision.batches)
        letters = settlement.dead_letters()
        commit_rows_of(run, record, pipeline, letters, decision.at, self._connections)
        return settlement

    def _index(self, report: SettleReport, sinks: Collection[str]) -> None:
        """Adds messages to the applied index.

        :param sinks: The batchers with a sink.
        """
        run, generation = self._run, self._record.generation
        manifest = run.manifest(generation)
        if manifest is None or not (manifest.claims or report.again):
            return
        messages, sent = applied_messages(
            run,
            manifest,
            self._served,
            self._plans,
            sinks,
            report.again or ComingAgain(),
            claims_of(run.store, run.pipeline, generation, manifest.claims),
            recorded=self._recorded,
        )
        until = datetime.fromisoformat(manifest.ended_at)
        for ids, kind in ((messages, False), (sent, True)):
            if ids:
                now = run.clock.now()
                note_applied(run.store, run.pipeline, generation, ids, now, until, sent=kind)

    def _archive(self, report: SettleReport, *, damaged: bool) -> None:
        run, record = self._run, self._record
        try:
            manifest = run.manifest(record.generation)
        except StagingDamaged as error:
            if not damaged:
                raise
            # All of it is redelivered, except messages that callbacks settled immediately.
            log.error("Nothing of generation %s is archived: %s", record.generation, error)
            return
        if manifest is not None and manifest.archived:
            from airflow_broadway.staging.archive.publication import publish  # loads pyarrow

            publish(run, record, manifest, report)
