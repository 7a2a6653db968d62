"""The one door by which a generation is settled: each message at its broker, by what became of it.

The sensor, a process task, a sweep and whoever stands in for the sensor all come through it.  What
is decided about a message, :mod:`airflow_broadway.staging.settling.settlement` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

from airflow_broadway.core.custody.protocol import Custodian, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.layout import paths, read_json
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.sources.pipelines import pipeline_of
from airflow_broadway.staging.archive.publication import publish
from airflow_broadway.staging.crash_records import record_crash
from airflow_broadway.staging.isolation import in_hand_at_interruptions
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import OPENED, SETTLING, GenerationRecord, StagedRun
from airflow_broadway.staging.settling.journal import Progress
from airflow_broadway.staging.settling.settlement import build_settlement, settle_generation

log = logging.getLogger(__name__)


class Settled(NamedTuple):
    """What became of a generation.

    :param report: What settling it did.
    :param settled_now: What callbacks had settled at once before.
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
    recorded: Recorded | None = None,
) -> Settled:
    """Settle one generation at its broker by what is recorded of it; the rest is released.

    May be called again at any time, and beside others: the first report stands for all.

    :param custodian: Opens the custodian; called once it is known what to settle.
    :param void: What is recorded counts no more: all is released but what callbacks settled at
        once.
    :param over: Whether no process of the run is at work any more: then a crash is recorded if a
        whole task died at batches that have no outcome.
    :param own: Whether the process that received the messages settles; else a generation without a
        manifest is one whose task died.
    :param release_damaged: Release everything if a file is not as it was written: nobody can say
        any more which messages failed.
    :param batchers: Those that may hold messages of it; all of the pipeline's unless given.
    :param recorded: What has been read of the run already.
    :raises StagingDamaged: If a file is not as it was written.
    :raises BroadwayError: If staging or the broker fails; the generation counts as unsettled.
    """
    recorded = recorded or Recorded(run)
    names = pipeline.batchers if batchers is None else batchers
    try:
        settlement, complete, progress = _decide(record, pipeline, names, recorded, final=not void)
        if over and not complete:
            _record_interruption(run, record, names, recorded)
    except StagingDamaged as error:
        if not release_damaged:
            raise
        log.error("Generation %s is given back whole: %s", record.generation, error)
        settlement, progress = Settlement(rest=RELEASE, damaged=True), Progress()
    if settlement.expected is None and not settlement.damaged and not own:
        _record_crash(run, record)
    if void:
        settlement = Settlement(
            rest=RELEASE,
            expected=settlement.expected,
            settled_now=settlement.settled_now,
            damaged=settlement.damaged,
        )
    return _carry_out(run, record, custodian, settlement, progress)


def _record_crash(run: StagedRun, record: GenerationRecord) -> None:
    """Record that a process task died before it published anything.

    Before its messages are given back: else one that ends each process could stay unknown.

    :raises StagingError: If the record cannot be written.
    """
    if record.state != OPENED:  # it was giving back, in order, or its crash is on record
        return
    path = paths.in_hand(record.generation)
    in_hand: list[str] = []
    try:
        in_hand = read_json(run.files.read(path), path)["ids"]
    except FileNotFoundError:
        pass
    except (StagingDamaged, KeyError) as error:  # its host died, too
        log.warning("The messages in hand are not known: %s", error)
    record_crash(run.store, run.pipeline, record.generation, in_hand, run.clock.now())


def settle_if_complete(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    custodian: Callable[[], Custodian],
    *,
    recorded: Recorded | None = None,
) -> Settled | None:
    """The same once each message has an outcome; ``None``: some has none yet, and all stays open.

    What somebody began to settle is finished whatever the outcomes: no more will come.
    """
    recorded = recorded or Recorded(run)
    settlement, complete, progress = _decide(
        record, pipeline, pipeline.batchers, recorded, final=False
    )
    if not complete and record.state != SETTLING:
        return None
    return _carry_out(run, record, custodian, settlement, progress)


def _decide(
    record: GenerationRecord,
    pipeline: Pipeline,
    batchers: Collection[str],
    recorded: Recorded,
    *,
    final: bool,
) -> tuple[Settlement, bool, Progress]:
    plans = recorded.deciding(batchers, record.generation)
    pipeline = pipeline_of(pipeline, record)
    return build_settlement(
        recorded.run,
        record.generation,
        pipeline,
        plans,
        final=final,
        recorded=recorded,
    )


def _record_interruption(
    run: StagedRun, record: GenerationRecord, batchers: Collection[str], recorded: Recorded
) -> None:
    """Record a crash if a whole task died at batches of a generation that have no outcome.

    Before the broker is asked: its messages come again once that is done.
    """
    plans = recorded.deciding(batchers, record.generation)
    try:
        found = in_hand_at_interruptions(recorded, record.generation, plans)
        if found is not None:
            now = run.clock.now()
            record_crash(
                run.store, run.pipeline, record.generation, found.messages, now, alone=found.alone
            )
    except StagingError as error:  # the next run is less careful: nothing is lost
        log.warning(
            "No crash is recorded of batches of generation %s: %s", record.generation, error
        )


def _carry_out(
    run: StagedRun,
    record: GenerationRecord,
    custodian: Callable[[], Custodian],
    settlement: Settlement,
    progress: Progress,
) -> Settled:
    def archive(report: SettleReport) -> None:
        try:
            manifest = run.manifest(record.generation)
        except StagingDamaged as error:
            if not settlement.damaged:
                raise
            # All of it comes again, but what callbacks settled at once.
            log.error("Nothing of generation %s is archived: %s", record.generation, error)
            return
        if manifest is not None and manifest.archived:
            publish(run, record, manifest, report)

    report = settle_generation(
        run, record, custodian(), settlement, progress=progress, between=archive
    )
    return Settled(report, progress.settled_now)
