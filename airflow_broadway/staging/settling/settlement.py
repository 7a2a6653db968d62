"""Settles recorded outcomes at the broker, once.

:func:`build_settlement` decides the verdict of each message of one generation;
:func:`settle_generation` executes the settlement and writes the journal.  Both are idempotent, also
when several processes call them concurrently: outcomes are only ever added, the custodian is
idempotent, and the first report is final.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from airflow_broadway.core.custody.protocol import Custodian, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import SETTLING, GenerationRecord, StagedRun
from airflow_broadway.staging.settling.held_messages import HeldMessages
from airflow_broadway.staging.settling.journal import (
    Progress,
    record_settled,
    settled_journal,
    settling_record,
)

log = logging.getLogger(__name__)


def build_settlement(
    run: StagedRun,
    generation: str,
    pipeline: Pipeline,
    plans: Sequence[BatchPlan] | None,
    *,
    final: bool,
    only: Collection[str] | None = None,
    recorded: Recorded | None = None,
    batches: Collection[str] | None = None,
) -> tuple[Settlement, bool, Progress]:
    """Decides the verdict of each message of one generation by the recorded outcomes.

    :param plans: The plans of batchers with messages of it; one per batcher.
    :param final: Whether no more outcomes can follow; missing ones are then logged.
    :param only: Batchers whose outcomes count; everything else is released.  ``None``: all count.
    :param recorded: A reader of the run, to avoid reading files twice.
    :param batches: The batches whose outcomes count; default: all that have one.
    :returns: The settlement; whether every message has an outcome (otherwise the settlement
        releases those without); and the counts.
    :raises StagingDamaged: If a file with verdicts is damaged, or counts do not agree.
    """
    manifest = run.manifest(generation)
    if manifest is None:
        return Settlement(rest=RELEASE, settled_now=SettleReport()), False, Progress()
    recorded = recorded or Recorded(run)
    state = HeldMessages(recorded, manifest, pipeline.producer, list(plans or ()), batches)
    progress = state.progress
    complete = progress.decided == progress.staged
    if final and not complete:
        log.warning(
            "generation %s: %d of %s released, without an outcome%s",
            generation,
            progress.staged - progress.decided,
            pluralize(progress.staged, "staged message"),
            f" (no plan for {', '.join(progress.unplanned)})" if progress.unplanned else "",
        )
    if only is not None:
        return (
            Settlement(
                rest=RELEASE,
                entries=lambda: state.entries_of_batches(only),
                expected=manifest.received - progress.settled_now.total,
                settled_now=progress.settled_now,
                dead_letters=lambda: state.dead_letters(only),
                batches=state.batches,
            ),
            complete,
            progress,
        )
    rest = ACK if complete and state.plain else RELEASE
    settlement = Settlement(
        rest=rest,
        entries=lambda: state.entries(all_rows=rest is RELEASE),
        everything=lambda: state.everything(rest),
        expected=manifest.received - progress.settled_now.total,
        settled_now=progress.settled_now,
        dead_letters=state.dead_letters,
        batches=state.batches,
    )
    return settlement, complete, progress


def applied_messages(
    run: StagedRun,
    manifest: Manifest,
    pipeline: Pipeline,
    plans: Sequence[BatchPlan],
    sinks: Collection[str],
    again: ComingAgain,
    claims: tuple[Mapping[str, str], AbstractSet[str]],
    *,
    recorded: Recorded,
) -> tuple[set[str], set[str]]:
    """Returns what the applied index gets of messages that succeeded in batches with a sink.

    :param plans: As for :func:`build_settlement`.
    :param sinks: The batchers with a sink.
    :param again: The messages to be redelivered.
    :param claims: The identities by message id, and the ids of redelivered messages.
    :returns: The ids of messages to be redelivered, with the identities of redelivered ones; and
        the identities of others.
    """
    messages: set[str] = set()
    sent: set[str] = set()
    identities, redelivered = claims
    if again.ids or again.all_but or identities:
        state = HeldMessages(recorded, manifest, pipeline.producer, list(plans))
        for entry in state.entries_of_batches(sinks):
            if entry.verdict.action is not Action.ACK:
                continue
            key = entry.message_id
            if again.has(key):
                messages.add(key)
            if key in identities:
                (messages if key in redelivered else sent).add(identities[key])
    return messages, sent


def begin_settlement(run: StagedRun, record: GenerationRecord, settlement: Settlement) -> bool:
    """Writes the intent to settle, after which no try begins or records a batch.

    :returns: Whether it was written by this call.
    """
    rest = settlement.rest.action.value
    intent = settling_record(run, record, rest=rest, expected=settlement.expected)
    return run.files.create(paths.intent(record.generation), intent)


def settle_generation(
    run: StagedRun,
    record: GenerationRecord,
    custodian: Custodian,
    settlement: Settlement,
    *,
    progress: Progress | None = None,
    between: Callable[[SettleReport], None] = lambda report: None,
) -> SettleReport:
    """Settles one generation at its broker, once.

    The steps are: write the intent, settle by the custodian, call ``between``, write the journal.
    After a crash between any two of these it is called again.  Every call returns the report that
    was written first.

    An outcome recorded after ``settlement`` was built and before the intent is too late: its
    messages are released and redelivered.

    :param progress: The counts of :func:`build_settlement`, for the journal.
    :param between: An idempotent step that belongs to the settlement.
    :raises BroadwayError: Any error of the custodian; the generation then remains unsettled.
    """
    begun = begin_settlement(run, record, settlement)
    done = None if begun else settled_journal(run, record.generation)
    if done is not None:
        return done.report
    if record.state == SETTLING:
        log.info("generation %s: resuming a settlement begun before", record.generation)
    report = custodian.settle(run.lease(record), settlement)
    between(report)
    return record_settled(run, record, report, progress=progress).report
