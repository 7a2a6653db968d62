"""Commits of batches to sinks: their ids, and the outcomes of batches whose commit has landed.

A batch is *in doubt* if its commit may have landed and no outcome is recorded.  Its sink then
decides: a commit that has landed is the batch's success.  If messages of the batch failed, the
outcome of an attempt is stored before its commit (*prepared*), and becomes the batch's outcome if
that attempt's commit has landed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_broadway.core.errors import BroadwayError, LeaseLapsed
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import CURE
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.model.sink import Commit, CommitRefused, SinkClient

log = logging.getLogger(__name__)


class InDoubt(BroadwayError):
    """It is unknown whether a batch's commit has landed: the batch has no outcome yet."""


class Overtaken(InDoubt):
    """The commit of another attempt has landed.

    :param attempt: Its number.
    """

    def __init__(self, attempt: int) -> None:
        super().__init__(f"the commit of attempt {attempt} has landed")
        self.attempt = attempt


def commit_id(batch_id: str, generations: Iterable[str]) -> str:
    """Returns the id of a batch's commit.

    Messages that were redelivered may form the same batch in other generations, and be committed
    there although the commit of the first was ruled out: so the generations are a part of it.

    :param generations: Those of the batch's plan.
    """
    digest = hashlib.sha256("\n".join(sorted(generations)).encode()).hexdigest()
    return f"{batch_id}.{digest[:8]}"


def commit_ids(plan: BatchPlan, batches: Iterable[PlannedBatch]) -> dict[str, PlannedBatch]:
    """Returns batches of a plan by the ids of their commits."""
    return {commit_id(batch.batch_id, plan.generations): batch for batch in batches}


def commit_rows(client: SinkClient, rows: Any, commit: Commit) -> None:
    """Commits the rows of a batch.

    :raises LeaseLapsed: If the commit was ruled out: its messages were released.
    :raises Overtaken: If another attempt's commit has landed.
    :raises InDoubt: If an error occurred, and the sink does not report whether the commit landed.
    :raises Exception: Any other error of the sink; nothing has landed.
    """
    try:
        client.commit(rows, commit)
    except Exception as error:
        attempt = _landed(client, commit, error)
        if attempt == commit.attempt:
            log.warning("The commit %s has landed in spite of: %s", commit.commit_id, error)
            return
        if attempt is not None:
            raise Overtaken(attempt) from error
        if isinstance(error, CommitRefused):
            raise LeaseLapsed(f"the commit {commit.commit_id} was ruled out; {CURE}") from error
        raise


def _landed(client: SinkClient, commit: Commit, cause: Exception) -> int | None:
    try:
        return client.landed([commit.commit_id]).get(commit.commit_id)
    except Exception as error:
        raise InDoubt(
            f"it is unknown whether the commit {commit.commit_id} has landed, after"
            f" {type(cause).__name__}: {cause}; a retry asks the sink again,"
            f" which answered: {error}"
        ) from cause


def record_landed(
    files: Files,
    plan: BatchPlan,
    batches: Mapping[str, PlannedBatch],
    landed: Mapping[str, int],
    *,
    by: str,
) -> list[Outcome]:
    """Records the outcomes of batches whose commit has landed.

    :param batches: As returned by :func:`commit_ids`.
    :param landed: Commit id → the attempt that has landed; other plans' ids are ignored.
    :param by: The calling task, for display.
    :returns: The valid outcomes.
    """
    outcomes = []
    for key, batch in batches.items():
        attempt = landed.get(key)
        if attempt is None:
            continue
        log.info("The commit %s of attempt %d has landed: its batch succeeded.", key, attempt)
        outcome = _outcome_of(files, plan, batch, attempt, by)
        path = paths.outcome(plan.path, batch.batch_id)
        if not files.create(path, outcome.dumps()):
            outcome = Outcome.loads(files.read(path), path)
        outcomes.append(outcome)
    return outcomes


def _outcome_of(
    files: Files, plan: BatchPlan, batch: PlannedBatch, attempt: int, by: str
) -> Outcome:
    path = paths.prepared(plan.path, batch.batch_id, attempt)
    try:
        return Outcome.loads(files.read(path), path)
    except FileNotFoundError:  # no message failed
        return Outcome(
            batch_id=batch.batch_id,
            batcher=plan.batcher,
            plan=plan.path,
            successful=batch.size,
            failed=0,
            writer=by,
            try_number=attempt,
        )
