"""Prepares the sink once per run before a past interval is handled again.

The process task does so immediately before it publishes its manifest.  That is before any batch of
the run, on every engine, and also if the interval has no messages.
"""

from __future__ import annotations

import logging

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import LeaseLapsed, PipelineError
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.callbacks import context_of
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)


def prepare_sink(run: StagedRun, pipeline: Pipeline, env: ProducerEnv) -> None:
    """Calls ``prepare_backfill`` in a backfill; only the first of its producers does so.

    :raises LeaseLapsed: If a newer execution of the task has begun.
    :raises PipelineError: If batches of the run, which the callback would undo, were handled.
    :raises Exception: Any exception of the callback.
    """
    source = pipeline.run.source
    interval = source.interval
    if interval is None or env.index or not pipeline.defines("prepare_backfill"):
        return
    if run.files.exists(paths.intent(env.generation)):
        raise LeaseLapsed(
            f"generation {env.generation} was abandoned before its sink was prepared: a newer"
            " execution of its task prepares it"
        )
    # Results of executions with another source are replaced like any earlier results.
    before = [
        (record.map_index == env.owner.get("map_index"), manifest)
        for record in run.generations()
        if record.generation != env.generation and record.source == source.to_json()
        if (manifest := run.manifest(record.generation)) is not None
    ]
    if source.goes_on and any(own for own, _ in before):
        log.info("The sink was prepared for the interval from %s; this run continues.", interval)
        return
    handled = any(manifest.received for own, manifest in before if not own)
    if handled and run.files.list("outcomes"):
        raise PipelineError(
            "batches of other producers of this run were handled already, and prepare_backfill"
            " would undo them: clear all process tasks of the run together"
        )
    log.info("Preparing the sink for the interval from %s.", interval)
    pipeline.prepare_backfill(interval, context_of(pipeline))
