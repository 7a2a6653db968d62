"""Commits of batches to sinks: their ids, and the outcomes of batches whose commit has landed.

A batch is *in doubt* if its commit may have landed and no outcome is recorded.  Its sink then
decides: a commit that has landed is the batch's success.  If messages of the batch failed, the
outcome of an attempt is stored before its commit (*prepared*), and becomes the batch's outcome if
that attempt's commit has landed.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import CURE
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.sink import (
    Commit,
    CommitInDoubt,
    CommitRefused,
    SinkClient,
    SinkError,
)

log = logging.getLogger(__name__)


#: Seconds before each try to rule out a commit after an error.
_PAUSES: Final = (0.0, 0.5, 1.0, 2.0, 4.0)


class Overtaken(CommitInDoubt):
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


def deletion_id(generation: str) -> str:
    """Returns the commit id of the deletion with which a generation's backfill begins."""
    return f"backfill.{generation}"


Check = Callable[[Exception], None]


def commit_rows(
    client: SinkClient, rows: Any, commit: Commit, *, check: Check = lambda error: None
) -> None:
    """Commits the rows of a batch; parameters and errors as in :func:`land`."""
    land(client, commit, lambda: client.commit(rows, commit), check)


def land(
    client: SinkClient, commit: Commit, write: Callable[[], None], check: Check = lambda error: None
) -> None:
    """Makes a commit.

    An error after which the commit may have landed is resolved by ruling the commit out: a read
    would prove nothing about a request that is still on its way.

    :param check: Called with such an error first; may raise, and thereby leave the commit to a
        later try, which makes it again, or to the settlement.
    :raises LeaseLapsed: If the commit was ruled out: its messages were released.
    :raises Overtaken: If another attempt's commit has landed.
    :raises CommitInDoubt: If the sink cannot be reached to rule the commit out.
    :raises SinkError: If nothing has landed, and nothing can.
    """
    try:
        write()
    except CommitRefused as error:
        if _attempt(client.landed, commit, error) is None:
            raise LeaseLapsed(f"the commit {commit.commit_id} was ruled out; {CURE}") from error
    except SinkError:
        raise
    except Exception as error:
        check(error)
        if _attempt(client.rule_out, commit, error) is None:
            raise SinkError(
                f"the commit {commit.commit_id} failed: {reason_of(error)}; nothing was written,"
                " and it is ruled out"
            ) from error
        log.warning("The commit %s has landed in spite of %s", commit.commit_id, reason_of(error))


def _attempt(
    ask: Callable[[list[str]], Mapping[str, int]], commit: Commit, cause: Exception
) -> int | None:
    """Returns the number of this attempt if its commit has landed, and ``None`` if none has.

    :raises Overtaken: If another attempt's commit has landed.
    """
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            attempt = ask([commit.commit_id]).get(commit.commit_id)
        except Exception as error:
            answer = error
            continue
        if attempt not in (None, commit.attempt):
            raise Overtaken(attempt) from cause
        return attempt
    raise CommitInDoubt(
        f"the commit {commit.commit_id} may have landed, after {reason_of(cause)}; its"
        f" sink cannot be asked ({reason_of(answer)}).  A retry of the task asks"
        " it again, and so does the run's settlement before it settles the messages"
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
