"""Run ``handle_batch`` again on staged batches: the same messages, boundaries and batch ids.

Nothing is settled at a broker, and the run's own outcomes stand: a replay has a folder of its own
(:mod:`airflow_broadway.runs.replay_folder`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import BroadwayError, RequestRefused
from airflow_broadway.core.formats.entries import load_line
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many
from airflow_broadway.runs.inspect import StagedBatch, staged_batches
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.replay_folder import add_result, make_replay_folder
from airflow_broadway.staging.run_folder import OPENED, StagedRun
from airflow_broadway.staging.tables import ParquetFile

log = logging.getLogger(__name__)

#: Failed messages of a batch that are kept by name.
KEPT: Final = 1000

#: Runs plans of Spark batchers in a replay's folder; returns what Spark ended with, if badly.
OnSpark = Callable[[StagedRun, Sequence[BatchPlan]], str]


# -- what came of it -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCounts:
    """What became of a batch's messages: those that succeeded, failed, and got no result.

    :param error: What failed the whole batch, if one thing did.
    :param seconds: How long ``handle_batch`` took.
    """

    successful: int
    failed: int
    missing: int
    error: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatch:
    """A batch that was replayed.

    :param before: What became of it in its run; ``now``: in this replay; ``None``: no outcome.
    :param failures: Ids of messages that failed now, each with its reason; ``KEPT`` at most.
    """

    batcher: str
    batch_id: str
    batch_key: Any
    size: int
    before: ResultCounts | None
    now: ResultCounts | None
    failures: Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a replay.

    :param replay: The replay's own run id; ``path``: the folder with its files.
    :param successful: Messages; so are ``failed`` and ``missing``, which got no result.
    :param without_outcome: Batches.
    :param error: What Spark ended with, if badly.
    """

    dag_id: str
    run_id: str
    replay: str
    path: str
    successful: int
    failed: int
    missing: int
    without_outcome: int
    error: str
    batches: Sequence[ReplayedBatch]


# -- what to replay, and with what -----------------------------------------------------------------


class StagedPipeline(NamedTuple):
    """What a run's files say of its pipeline.

    :param ref: Its reference; ``None`` if the run had no Spark application.  Whoever may write
        files chose it: it is not to be imported unasked.
    :param info: What callbacks may know of the run.
    """

    ref: dict[str, Any] | None
    info: RunInfo


def staged_pipeline(run: StagedRun) -> StagedPipeline:
    """The pipeline that the run's last Spark application was given."""
    found = [re.fullmatch(r".+-(\d+)\.json", name) for name in run.files.list("work")]
    names = sorted((int(match[1]), match[0]) for match in found if match)
    if not names:
        return StagedPipeline(None, RunInfo(dag_id=run.dag_id, run_id=run.run_id))
    path = f"work/{names[-1][1]}"
    work = Work.loads(run.files.read(path), path)
    return StagedPipeline(work.pipeline, RunInfo.from_json({**work.run, "try_number": 1}))


def choose(
    run: StagedRun, *, batcher: str | None = None, batch_ids: Collection[str] = ()
) -> list[StagedBatch]:
    """The batches to replay: those with an outcome, or those that are named.

    What has no outcome went back to its broker, or will, and another run handles it: it is replayed
    only by name.  So is what an execution handled before the run was made to read a past interval,
    or to read it once more: that execution's rows were replaced.

    :raises RequestRefused: If nothing is left, or something named is not there.
    """
    found = list(staged_batches(run))
    if not found:
        raise RequestRefused(
            f"run {run.run_id!r} has no staged batches: no batcher task of it ended"
        )
    if batcher is not None:
        known = sorted({each.plan.batcher for each in found})
        if batcher not in known:
            raise RequestRefused(
                f"run {run.run_id!r} has no batches of the batcher {batcher!r}; it has some of"
                f" {known}"
            )
        found = [each for each in found if each.plan.batcher == batcher]
    if batch_ids:
        wanted = set(batch_ids)
        chosen = [each for each in found if each.planned.batch_id in wanted]
        unknown = sorted(wanted - {each.planned.batch_id for each in chosen})
        if unknown:
            raise RequestRefused(
                f"run {run.run_id!r} has no batch {', '.join(unknown)}: `airflow-broadway show`"
                " lists those it has"
            )
        return chosen
    replaced = _replaced(run)
    chosen = [
        each
        for each in found
        if each.outcome is not None and replaced.isdisjoint(each.plan.generations)
    ]
    if not chosen:
        raise RequestRefused(
            f"none of {many(len(found), 'batch')} of run {run.run_id!r} was handled: their"
            " messages go back to the queue, and the next run handles them; to run some here all"
            " the same, name them with --batch-id"
        )
    return chosen


def _replaced(run: StagedRun) -> set[str]:
    """The generations before the last one that began to read a past interval, or a past run."""
    records = run.generations()
    # The first of its producers reads all of it, or prepares its sink.
    past = [
        each
        for each in records
        if each.map_index <= 0
        and each.state != OPENED
        and RunSource.from_json(each.source).is_whole
    ]
    if not past:
        return set()
    last = max(past, key=lambda each: each.opened_at)
    begun = last.opened_at
    if RunSource.from_json(last.source).goes_on:
        same = [each.opened_at for each in records if each.source == last.source]
        begun = min(same)
    return {each.generation for each in records if each.opened_at < begun}


def check_batchers(run: StagedRun, pipeline: Pipeline, chosen: Sequence[StagedBatch]) -> None:
    """Refuse a pipeline that cannot handle these batches.

    :raises RequestRefused: If it lacks a batcher, or has it for another engine.
    """
    for plan in {each.plan.path: each.plan for each in chosen}.values():
        batcher = pipeline.batchers.get(plan.batcher)
        if batcher is None:
            raise RequestRefused(
                f"the pipeline {pipeline.name!r} has no batcher {plan.batcher!r}; it has"
                f" {sorted(pipeline.batchers)}"
            )
        staged = _engine(run, plan)
        if staged not in (None, batcher.engine):
            raise RequestRefused(
                f"the batches of {plan.batcher!r} were staged for engine={staged!r}, and the"
                f" pipeline now has engine={batcher.engine!r}: replay them with the class as it was"
            )


def _engine(run: StagedRun, plan: BatchPlan) -> str | None:
    """For which engine a plan's data was staged; ``None`` if it has none."""
    for name in plan.data:
        path = f"{plan.path}/{name}"
        if run.files.exists(path):
            with ParquetFile(run.files, path) as file:
                return "python" if "_flush" in file.columns else "spark"
    return None


# -- replaying -------------------------------------------------------------------------------------


def replay(
    run: StagedRun, pipeline: Pipeline, chosen: Sequence[StagedBatch], on_spark: OnSpark
) -> Replayed:
    """Run batches again, those of Spark batchers all at once by ``on_spark``.

    :raises RequestRefused: If data of a chosen batch is gone.
    :raises BroadwayError: If they cannot be run; what has run by then is kept.
    """
    target, plans = make_replay_folder(run, chosen)
    try:
        error = _run(target, pipeline, plans, on_spark)
    except BroadwayError:
        if not target.files.list("outcomes"):  # nothing ran
            target.files.remove_all()
        raise
    result = _result(run, target, chosen, error)
    kept = asdict(result)
    del kept["batches"]
    add_result(target, kept)
    return result


class _PythonReplay(PythonBatches):
    """Batches of a Python batcher whose messages are nobody's to settle."""

    def settle_now(
        self, generation: str, entries: list[Entry]
    ) -> tuple[SettleReport, list[Entry], list[Entry]]:
        count = many(len(entries), "message")
        log.info("ack_immediately of %s: a replay settles nothing.", count)
        return SettleReport(), entries, []


def _run(
    target: StagedRun, pipeline: Pipeline, plans: Sequence[BatchPlan], on_spark: OnSpark
) -> str:
    """Run the plans; returns what Spark ended with, if badly."""
    python = [each for each in plans if pipeline.batchers[each.batcher].engine == "python"]
    for plan in python:
        _PythonReplay(target, pipeline, plan).run()
    spark = [each for each in plans if each not in python]
    return on_spark(target, spark) if spark else ""


def _result(
    run: StagedRun, target: StagedRun, chosen: Sequence[StagedBatch], error: str
) -> Replayed:
    batches = [_batch(target, each) for each in chosen]
    done = [each.now for each in batches if each.now is not None]
    return Replayed(
        dag_id=run.dag_id,
        run_id=run.run_id,
        replay=target.run_id,
        path=f"{target.store.uri}/{target.path}",
        successful=sum(each.successful for each in done),
        failed=sum(each.failed for each in done),
        missing=sum(each.missing for each in done),
        without_outcome=len(batches) - len(done),
        error=error,
        batches=batches,
    )


def _batch(target: StagedRun, chosen: StagedBatch) -> ReplayedBatch:
    plan, planned, before = chosen
    path = paths.outcome(plan.path, planned.batch_id)
    now: Outcome | None = None
    if target.files.exists(path):
        now = Outcome.loads(target.files.read(path), path)
    return ReplayedBatch(
        batcher=plan.batcher,
        batch_id=planned.batch_id,
        batch_key=planned.batch_key,
        size=planned.size,
        before=_counts(before),
        now=_counts(now),
        failures=_failures(target, now),
    )


def _counts(outcome: Outcome | None) -> ResultCounts | None:
    if outcome is None:
        return None
    return ResultCounts(
        successful=outcome.successful,
        failed=outcome.failed,
        missing=outcome.missing,
        error=outcome.error,
        seconds=outcome.seconds,
    )


def _failures(target: StagedRun, outcome: Outcome | None) -> list[dict[str, str]]:
    path = None if outcome is None else outcome.exceptions
    found: list[dict[str, str]] = []
    for text in () if path is None else entry_lines(target.files, path):
        entry = load_line(text).entry
        if entry.verdict.reason:
            found.append({"message_id": entry.message_id, "reason": entry.verdict.reason})
        if len(found) >= KEPT:
            break
    return found
