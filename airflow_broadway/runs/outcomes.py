"""What became of staged batches, for the log of a task that finds nothing to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan

if TYPE_CHECKING:
    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["is_settled", "log_settled", "outcomes"]

#: Batches that the log names one by one, with what became of each.
MAX_LOGGED: Final = 100


def log_settled(log: Any, run: StagedRun, heads: Sequence[BatchPlan]) -> None:
    """Log when and how batches were settled, and how to run them again all the same."""
    generations = sorted({name for head in heads for name in head.generations})
    settled = {name: _how_settled(run, name) for name in generations}
    if not any(settled.values()):
        return
    found = (outcome for head in heads for outcome in outcomes(run, head))
    for outcome in itertools.islice(found, MAX_LOGGED):
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
    for name, when in settled.items():
        log.info("Generation %s: %s.", name, when or "not settled yet")
    log.info(
        "The messages are settled, so clearing this task runs nothing.  To handle the batches"
        " again from staging: airflow-broadway replay --dag-id %s --run-id %s",
        run.dag_id,
        run.run_id,
    )


def outcomes(run: StagedRun, head: BatchPlan) -> Iterator[Outcome]:
    """The recorded outcomes of a plan's batches, in order."""
    from airflow_broadway.staging.plan_choice import Recorded

    return (outcome for _, outcome in Recorded(run).outcomes(head) if outcome is not None)


def is_settled(run: StagedRun, generation: str) -> bool:
    """Whether somebody has begun to settle a generation."""
    return run.files.exists(paths.intent(generation)) or run.files.exists(paths.settled(generation))


def _how_settled(run: StagedRun, generation: str) -> str:
    """How a generation was settled, for people; empty if it was not."""
    from airflow_broadway.staging.settlement_journal import settled_journal

    journal = settled_journal(run, generation)
    if journal is None:
        return "being settled" if run.files.exists(paths.intent(generation)) else ""
    counts = asdict(journal.report + journal.settled_now)
    shown = ", ".join(f"{name} {n}" for name, n in counts.items() if isinstance(n, int) and n)
    return f"settled at {journal.at} by {journal.by}: {shown or 'it held no message'}"
