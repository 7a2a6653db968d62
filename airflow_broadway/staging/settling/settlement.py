"""From recorded outcomes to what is settled at the broker, once.

:func:`build_settlement` says what becomes of each message of one generation;
:func:`settle_generation` carries it out, and keeps a journal.  Both may be called again at any
time, by several processes at once: outcomes are only ever added, the custodian is idempotent, and
the first report that is written stands.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from airflow_broadway.core.custody.protocol import Custodian, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE
from airflow_broadway.core.formats.layout import VERSION, paths
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many
from airflow_broadway.core.version import __version__
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settling.held_messages import HeldMessages
from airflow_broadway.staging.settling.journal import Progress, record_settled, settled_journal
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)


def build_settlement(
    run: StagedRun,
    generation: str,
    pipeline: Pipeline,
    plans: Sequence[BatchPlan] | None,
    *,
    final: bool,
    recorded: Recorded | None = None,
) -> tuple[Settlement, bool, Progress]:
    """Say what becomes of each message of one generation, by what is recorded now.

    :param plans: Those of the run's batchers that hold messages of it; one per batcher.
    :param final: Whether nothing more will be recorded: what is missing is then logged.
    :param recorded: What has been read of the run already, so that it is not read again.
    :returns: The settlement; whether every message has an outcome (where not, carrying the
        settlement out releases those without); and the counts.
    :raises StagingDamaged: If a file that says what becomes of messages is not as it was written,
        or counts do not agree.
    """
    manifest = run.manifest(generation)
    if manifest is None:
        return Settlement(rest=RELEASE, settled_now=SettleReport()), False, Progress()
    held = HeldMessages(recorded or Recorded(run), manifest, pipeline.producer, list(plans or ()))
    complete = held.decided == held.staged
    if final and not complete:
        log.warning(
            "generation %s: %d of %s given back, without an outcome%s",
            generation,
            held.staged - held.decided,
            many(held.staged, "staged message"),
            f" (no plan for {', '.join(held.unplanned)})" if held.unplanned else "",
        )
    rest = ACK if complete and held.plain else RELEASE
    settlement = Settlement(
        rest=rest,
        entries=lambda: held.entries(all_rows=rest is RELEASE),
        everything=lambda: held.everything(rest),
        expected=manifest.received - held.settled_now.total,
        settled_now=held.settled_now,
    )
    return settlement, complete, held.progress()


def settle_generation(
    run: StagedRun,
    record: GenerationRecord,
    custodian: Custodian,
    settlement: Settlement,
    *,
    progress: Progress | None = None,
    by: str = "",
    between: Callable[[SettleReport], None] = lambda report: None,
) -> SettleReport:
    """Settle one generation at its broker, once.

    The intent is written down, the custodian settles, ``between`` is called, the report is written
    down.  After a crash between any two of these it is called again.  Whoever calls it, and however
    often, gets the one report that was written first.

    An outcome that is recorded after ``settlement`` was made, and before the intent, comes too
    late: its messages are released, and come again, marked.

    :param progress: Of :func:`build_settlement`; kept in the journal.
    :param by: Who settles, for people: the task and its try.
    :param between: What belongs to the settlement besides, safe to repeat.
    :raises BroadwayError: Whatever the custodian raises; the generation then counts as unsettled.
    """
    done = settled_journal(run, record.generation)
    if done is not None:
        return done.report
    intent = {
        "version": VERSION,
        "release": __version__,
        "generation": record.generation,
        "rest": settlement.rest.action.value,
        "expected": settlement.expected,
        "by": by or host_name(),
        "at": run.clock.now().isoformat(),
    }
    if not run.files.create(paths.intent(record.generation), json.dumps(intent)):
        log.info("generation %s: settling was begun before; going on", record.generation)
    report = custodian.settle(run.lease(record), settlement)
    between(report)
    return record_settled(run, record, report, progress=progress, by=by).report
