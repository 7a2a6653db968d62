"""Sweeps: settles the messages of dead executions, and removes files past their retention."""

from __future__ import annotations

import logging
from contextlib import closing
from datetime import timedelta

from airflow_broadway.core.custody.protocol import Custodian
from airflow_broadway.core.errors import BroadwayError, RequestRefused
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.layout import SHARED
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.connections import Connections
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.metrics import Metrics
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.settle import settle
from airflow_broadway.runs.sources.pipelines import Custodians
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.retention import KEEP, remove_run, sweep_retention
from airflow_broadway.staging.run_folder import (
    SETTLED,
    SETTLING,
    GenerationRecord,
    StagedRun,
    iter_open,
)

log = logging.getLogger(__name__)


def sweep(
    run: StagedRun, pipeline: Pipeline, task: Task, ports: Ports, source: RunSource | None = None
) -> None:
    """Settles the messages of earlier executions of this task and of runs that are over.

    After a time-out of the run, its deletion, or a sensor state set by hand, no task settles it any
    more.  Messages with an outcome are settled by it, the rest is released, and the run is
    accounted for.  A failure to settle is logged; the lease then lapses.

    A generation of another Airflow is skipped until its lease has lapsed by the run's clock.

    A run whose source is not a broker sweeps only generations of such runs.

    :param pipeline: The pipeline as loaded, with its own producer.
    :param source: The source of this run.
    :raises BroadwayError: If staging cannot be read, or the broker's address is unknown.
    """
    source = source or RunSource()
    custodians = Custodians(pipeline, ports, run)
    metrics = Metrics(ports.metrics, pipeline=pipeline.name, dag_id=task.dag_id)
    over: dict[str, bool] = {}
    dead: dict[str, StagedRun] = {}
    unrecorded: list[tuple[StagedRun, str]] = []
    for other, record in iter_open(run.store, pipeline.name, task.dag_id):
        if not source.asks_broker and RunSource.from_json(record.source).asks_broker:
            continue
        foreign = run.is_foreign(record)
        if foreign and _is_held(run, other, record):
            continue
        own = other.run_id == task.run_id and not foreign
        if own and (record.task_id, record.map_index) != (task.task_id, task.map_index):
            continue
        if not own and not foreign:
            if other.run_id not in over:
                over[other.run_id] = ports.is_over(other.run_id)
            if not over[other.run_id]:
                continue
        if other.run_id != task.run_id:
            dead[other.run_id] = other
        # An execution that was retried or cleared is void, regardless of its batches' outcomes;
        # but a settlement that has begun is completed.  Its batcher tasks may still be running, so
        # their deaths are counted by their own retries.
        void = own and bool(pipeline.batchers) and record.state != SETTLING
        ended = not own and not foreign
        with log_ids(generation=record.generation):
            settled = record.state == SETTLED or _settle(
                other,
                record,
                pipeline,
                custodians.of(record),
                metrics,
                ports.connections,
                void=void,
                over=ended,
            )
        if settled and not other.files.exists(paths.generation(record.generation)):
            unrecorded.append((other, record.generation))
    custodians.close()
    left = {run_id for run_id, other in dead.items() if not _account(other, pipeline, ports)}
    for other, generation in unrecorded:
        # The process that opened it or removed its files died meanwhile: no report lists it.
        if other.run_id not in left:
            other.forget_open(generation)


def _is_held(run: StagedRun, other: StagedRun, record: GenerationRecord) -> bool:
    """Whether the lease of another Airflow's generation has not lapsed, so that it is skipped.

    This Airflow does not know whether that run has ended.

    :param run: The run that sweeps.
    :param other: The generation's run.
    """
    try:
        until = other.lease(record).deadline
    except BroadwayError as error:
        log.warning("Generation %s of another Airflow is skipped: %s", record.generation, error)
        return True
    if until <= run.clock.now():
        return False
    if record.state != SETTLED:
        log.warning(
            "Run %s of another Airflow (%r, host %r; this one is %r) holds messages in generation"
            " %s: they are skipped until its lease lapses at %s.  Two Airflows with one queue"
            " and one staging root share its messages.",
            other.run_id,
            record.airflow,
            record.host,
            run.airflow,
            record.generation,
            until.isoformat(timespec="seconds"),
        )
    return True


def _account(run: StagedRun, pipeline: Pipeline, ports: Ports) -> bool:
    """Accounts for a dead run once all of it is settled, so that retention may remove it.

    :returns: Whether the report was written.
    """
    try:
        with closing(RunWatcher(run, pipeline, ports=ports)) as watcher:
            if any(record.state != SETTLED for record in run.generations()):
                return False
            watcher.report(failed_tasks=())
    except BroadwayError as error:
        log.warning("Could not account for run %s: %s", run.run_id, error)
        return False
    return True


def _settle(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    custodian: Custodian,
    metrics: Metrics,
    connections: Connections,
    *,
    void: bool,
    over: bool,
) -> bool:
    """Settles and counts the messages of a dead execution; returns whether it is settled.

    :param over: Whether no process of the run is running any more.
    """
    try:
        settled = settle(
            run,
            record,
            pipeline,
            lambda record: custodian,
            void=void,
            over=over,
            release_damaged=True,
            connections=connections,
        )
    except Exception as error:
        # This must not fail the run: the lease lapses by itself.
        unexpected = None if isinstance(error, BroadwayError) else error
        log.warning(
            "Could not settle generation %s: %s", record.generation, error, exc_info=unexpected
        )
        return False
    report = settled.report
    metrics.settled(report + settled.settled_now)
    log.info(
        "Settled the dead generation %s (run %s, %s, try %d): released %s, %d had an"
        " outcome, %d had lapsed.",
        record.generation,
        run.run_id,
        record.task_id,
        record.try_number,
        pluralize(report.released, "message"),
        report.total - report.released - report.lapsed,
        report.lapsed,
    )
    return True


def remove_old_runs(run: StagedRun, pipeline: Pipeline) -> None:
    """Removes files past their retention: of this Dag's runs, temporary files of the producer, and
    hours of the archive past its ``keep``.
    """
    try:
        sweep_retention(run.store, run.pipeline, run.dag_id, spared=[run.run_id])
        if pipeline.producer.kind:
            before = run.clock.now() - timedelta(seconds=KEEP)
            for owner in (pipeline.name, SHARED):
                folder = run.store.folder(f"{owner}/{pipeline.producer.kind}")
                folder.remove_temporary("", before, below=True)
        archive = pipeline.archive
        if archive is not None:
            from airflow_broadway.staging.archive.table import archive_folder, maintain

            maintain(archive_folder(run.store, run.pipeline), archive.keep, run.clock.now())
    except BroadwayError as error:
        # The role may be allowed to write but not to delete; this must not fail the run.
        log.warning("Could not remove the files of old runs: %s", error)


def remove_settled_run(run: StagedRun) -> None:
    """Removes the files of a run on request.

    :raises RequestRefused: If a generation of it is not settled.
    :raises StagingError: If the files cannot be removed.
    """
    unsettled = [record for record in run.generations() if record.state != SETTLED]
    if unsettled:
        raise RequestRefused(
            f"run {run.run_id!r} of the Dag {run.dag_id!r} has"
            f" {pluralize(len(unsettled), 'generation')} without a settlement"
            f" ({', '.join(record.generation for record in unsettled)}): clear its `ack` task, or"
            " let the next run release these messages, and then remove it"
        )
    remove_run(run)
