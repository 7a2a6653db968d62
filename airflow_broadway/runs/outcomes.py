"""Logs the outcomes of staged batches when a task has nothing to do."""

from __future__ import annotations

import itertools
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.journal import settled_journal

log = logging.getLogger(__name__)

#: Maximum number of batches whose outcomes are logged one by one.
MAX_LOGGED: Final = 100


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
    recorded = Recorded(run)
    outcomes = (outcome for head in heads for _, outcome in recorded.outcomes(head) if outcome)
    for outcome in itertools.islice(outcomes, MAX_LOGGED):
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
