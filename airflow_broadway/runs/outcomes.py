"""The outcomes of a task's batches: for its log, and for the asset events of its outlets."""

from __future__ import annotations

import itertools
import json
import logging
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.journal import settled_journal

log = logging.getLogger(__name__)

#: Maximum number of batches whose outcomes are logged one by one.
MAX_LOGGED: Final = 100
#: Maximum number of batch ids in an asset event, since events are stored in Airflow's database.
MAX_IDS: Final = 1_000


def run_again_command(dag_id: str, run_id: str) -> str:
    """Returns the command that starts a run which replays the batches of a past run."""
    conf = json.dumps({"source": "run", "source_run": run_id})
    return f"airflow dags trigger {dag_id} --conf {shlex.quote(conf)}"


def is_settled(run: StagedRun, generation: str) -> bool:
    """Whether the settlement of a generation has begun."""
    return run.files.exists(paths.intent(generation)) or run.files.exists(paths.settled(generation))


def log_settled(run: StagedRun, heads: Sequence[BatchPlan]) -> None:
    """Logs when and how batches were settled, and the command that replays them.

    Logs nothing while none of their generations is settled.

    :param heads: The plans of the batches.
    """
    generations = sorted({name for head in heads for name in head.generations})
    settled = {name: _describe_settlement(run, name) for name in generations}
    if not any(settled.values()):
        return
    for outcome in itertools.islice(Recorded(run).handled(heads), MAX_LOGGED):
        log.info(
            "%s %s: %d succeeded, %d failed%s, recorded by %s at %s.",
            outcome.batcher,
            outcome.batch_id,
            outcome.successful,
            outcome.failed,
            f" ({outcome.error})" if outcome.error else "",
            outcome.writer,
            outcome.started_at,
        )
    for name, how in settled.items():
        log.info("Generation %s: %s.", name, how or "not settled yet")
    log.info(
        "The messages are settled, so clearing this task runs nothing.  To replay the batches"
        " from staging: %s",
        run_again_command(run.dag_id, run.run_id),
    )


def _describe_settlement(run: StagedRun, generation: str) -> str:
    """Describes how a generation was settled; empty if it was not."""
    journal = settled_journal(run, generation)
    if journal is None:
        return "being settled" if run.files.exists(paths.intent(generation)) else ""
    counts = asdict(journal.report + journal.settled_now)
    summary = ", ".join(f"{name} {n}" for name, n in counts.items() if isinstance(n, int) and n)
    return f"settled at {journal.at} by {journal.by}: {summary or 'it held no message'}"


def successful_outcomes(run: StagedRun, heads: Iterable[BatchPlan]) -> dict[str, list[Outcome]]:
    """Reads the outcomes of plans in which at least one message succeeded, per batcher.

    :raises StagingError: If outcomes cannot be read.
    """
    recorded = Recorded(run)
    by_batcher: dict[str, list[Outcome]] = {}
    for head in heads:
        outcomes = by_batcher.setdefault(head.batcher, [])
        outcomes += [outcome for outcome in recorded.handled([head]) if outcome.successful]
    return by_batcher


def event_extra(pipeline: str, outcomes: Sequence[Outcome]) -> Mapping[str, Any]:
    """Returns the ``extra`` of an outlet's asset event, with at most :data:`MAX_IDS` batch ids."""
    return {
        "pipeline": pipeline,
        "batches": len(outcomes),
        "successful": sum(outcome.successful for outcome in outcomes),
        "failed": sum(outcome.failed for outcome in outcomes),
        "batch_ids": [outcome.batch_id for outcome in outcomes[:MAX_IDS]],
        "batch_ids_left_out": max(0, len(outcomes) - MAX_IDS),
    }
