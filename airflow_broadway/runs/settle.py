"""Settles a generation: each message at its broker, by its recorded outcome.

The sensor, process tasks, sweeps and the sensor's stand-in all use this module.  The verdict of a
message is decided in :mod:`airflow_broadway.staging.settling.settlement`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
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


def settle(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    custodian: Callable[[], Custodian],
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
    recorded = recorded or Recorded(run)
    served = pipeline_of(pipeline, record)
    names = list(pipeline.batchers if batchers is None else batchers)

    def decide() -> tuple[Settlement, bool, Progress, list[BatchPlan]]:
        plans = recorded.deciding(names, record.generation)
        settlement = build_settlement(
            run, record.generation, served, plans, final=not void, only=only, recorded=recorded
        )
        return *settlement, plans

    only = None

    try:
        sinks = _batchers_with_sink(pipeline, names, recorded)
        only = sinks if void else None
        _check_removed_batchers(run, record, pipeline, recorded)
        settlement, complete, progress, plans = decide()
        if not complete and (sinks or deletes_rows(pipeline, record)):
            # From the intent on no try begins a commit; those begun before are ruled out.
            begin_settlement(run, record, settlement)
            recorded.forget_outcomes()  # there may be more plans, batches and outcomes since
            resolver = connections or NoConnections()
            resolve(run, pipeline, record.generation, resolver, sinks, recorded=recorded)
            rule_out_deletion(pipeline, record, resolver)
            settlement, complete, progress, plans = decide()
        if over and not complete:
            _record_interruption(run, record, plans, recorded)
    except StagingDamaged as error:
        if not release_damaged:
            raise
        log.error("All of generation %s is released: %s", record.generation, error)
        settlement, progress = Settlement(rest=RELEASE, damaged=True), Progress()
        plans, sinks = [], []
    if settlement.expected is None and not settlement.damaged and not own:
        _record_crash(run, record)
    index = _indexer(run, record, served, plans, sinks, recorded)
    settlement = _with_rows(
        run, record, served, settlement, names, only, connections=connections, recorded=recorded
    )
    return _carry_out(run, record, custodian, settlement, progress, index)


def _check_removed_batchers(
    run: StagedRun, record: GenerationRecord, pipeline: Pipeline, recorded: Recorded
) -> None:
    """Checks that no batcher with a sink was removed or renamed: its outcomes would not count.

    :raises SinkError: If one was.
    """
    manifest = run.manifest(record.generation)
    for name in (manifest.batchers if manifest else {}).keys() - pipeline.batchers.keys():
        for plan in recorded.plans(name):
            if plan.sink is not None and record.generation in plan.generations:
                plan.check_sink(None)


def _with_rows(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    settlement: Settlement,
    batchers: Iterable[str],
    only: Collection[str] | None,
    *,
    connections: Connections | None,
    recorded: Recorded,
) -> Settlement:
    """Commits the rows of a settlement's dead letters; returns the settlement that they belong to.

    That is another one if a settlement begun before knew other outcomes.

    :param only: As for :func:`build_settlement`.
    :raises SinkError: If the table cannot be written; the generation remains unsettled.
    """
    if pipeline.dead_letter_table is None or next(settlement.dead_letters(), None) is None:
        return settlement
    # It loads pyarrow.
    from airflow_broadway.runs.dead_letter_table import commit_rows_of, fix_decision

    begun = begin_settlement(run, record, settlement)
    if not begun and settled_journal(run, record.generation) is not None:
        return settlement
    decision = fix_decision(run, record, settlement, only)
    if not decision.own:
        recorded.forget_outcomes()
        plans = recorded.deciding(batchers, record.generation)
        settlement, _, _ = build_settlement(
            run,
            record.generation,
            pipeline,
            plans,
            final=False,
            only=decision.only,
            recorded=recorded,
            batches=decision.batches,
        )
    letters = settlement.dead_letters()
    resolver = connections or NoConnections()
    commit_rows_of(run, record, pipeline, letters, decision.at, resolver)
    return settlement


def _batchers_with_sink(
    pipeline: Pipeline, batchers: Iterable[str], recorded: Recorded
) -> list[str]:
    """Returns the batchers that have a sink, or had one when a plan was written."""
    return [
        name
        for name in batchers
        if pipeline.batchers[name].sink is not None
        or any(plan.sink is not None for plan in recorded.plans(name))
    ]


def _indexer(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    plans: list[BatchPlan],
    sinks: Collection[str],
    recorded: Recorded,
) -> Callable[[SettleReport], None]:
    """Returns a step of the settlement: it adds messages to the applied index."""

    def index(report: SettleReport) -> None:
        generation = record.generation
        manifest = run.manifest(generation) if sinks else None
        if manifest is None or not (manifest.claims or report.again):
            return
        again = report.again or ComingAgain()
        claims = claims_of(run.store, run.pipeline, generation, manifest.claims)
        messages, sent = applied_messages(
            run, manifest, pipeline, plans, sinks, again, claims, recorded=recorded
        )
        until = datetime.fromisoformat(manifest.ended_at)
        for ids, kind in ((messages, False), (sent, True)):
            if ids:
                now = run.clock.now()
                note_applied(run.store, run.pipeline, generation, ids, now, until, sent=kind)

    return index


def _record_crash(run: StagedRun, record: GenerationRecord) -> None:
    """Records that a process task died before it published its manifest.

    Called before its messages are released; otherwise a message that crashes every process could
    remain undetected.

    :raises StagingError: If the record cannot be written.
    """
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


def settle_if_complete(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    custodian: Callable[[], Custodian],
    *,
    connections: Connections | None = None,
    recorded: Recorded | None = None,
) -> Settled | None:
    """Settles a generation once each message has an outcome; returns ``None`` before that.

    A settlement that has begun is completed in any case, since no outcome can follow.
    """
    if record.state == SETTLING:
        return settle(run, record, pipeline, custodian, connections=connections, recorded=recorded)
    recorded, names = recorded or Recorded(run), pipeline.batchers
    plans = recorded.deciding(names, record.generation)
    served = pipeline_of(pipeline, record)
    settlement, complete, progress = build_settlement(
        run, record.generation, served, plans, final=False, recorded=recorded
    )
    if not complete:
        return None
    sinks = _batchers_with_sink(pipeline, names, recorded)
    index = _indexer(run, record, served, plans, sinks, recorded)
    settlement = _with_rows(
        run, record, served, settlement, names, None, connections=connections, recorded=recorded
    )
    return _carry_out(run, record, custodian, settlement, progress, index)


def _record_interruption(
    run: StagedRun, record: GenerationRecord, plans: Sequence[BatchPlan], recorded: Recorded
) -> None:
    """Records a crash if a whole task died at batches of a generation that have no outcome.

    Called before the settlement, after which the messages may be redelivered.
    """
    from airflow_broadway.staging.isolation import in_hand_at_interruptions  # loads pyarrow

    try:
        hand = in_hand_at_interruptions(recorded, record.generation, plans)
        if hand is not None:
            now = run.clock.now()
            record_crash(
                run.store, run.pipeline, record.generation, hand.messages, now, alone=hand.alone
            )
    except StagingError as error:  # nothing is lost: the next run only isolates less
        log.warning(
            "No crash is recorded of batches of generation %s: %s", record.generation, error
        )


def _carry_out(
    run: StagedRun,
    record: GenerationRecord,
    custodian: Callable[[], Custodian],
    settlement: Settlement,
    progress: Progress,
    index: Callable[[SettleReport], None],
) -> Settled:
    def archive(report: SettleReport) -> None:
        try:
            manifest = run.manifest(record.generation)
        except StagingDamaged as error:
            if not settlement.damaged:
                raise
            # All of it is redelivered, except messages that callbacks settled immediately.
            log.error("Nothing of generation %s is archived: %s", record.generation, error)
            return
        if manifest is not None and manifest.archived:
            from airflow_broadway.staging.archive.publication import publish  # loads pyarrow

            publish(run, record, manifest, report)

    def between(report: SettleReport) -> None:
        if not settlement.damaged:  # otherwise its messages are unknown
            index(report)
        archive(report)

    report = settle_generation(
        run, record, custodian(), settlement, progress=progress, between=between
    )
    return Settled(report, progress.settled_now)
