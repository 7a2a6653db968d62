"""Before a past interval is handled again its sink is made ready, once in a run.

The process task does it, right before its messages count: before any batch of the run, whatever
engines and tasks these have, and also where no message is left for one of them.
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
    """Call ``prepare_backfill``, if the run is one; of its producers the first does so.

    :raises LeaseLapsed: If a newer execution of the task has begun.
    :raises PipelineError: If batches of the run were handled already, which it would undo.
    :raises Exception: Whatever the callback raises.
    """
    source = pipeline.run.source
    interval = source.interval
    if interval is None or env.index or not pipeline.defines("prepare_backfill"):
        return
    if run.files.exists(paths.intent(env.generation)):
        raise LeaseLapsed(
            f"generation {env.generation} was given up before its sink was prepared: a newer"
            " execution of its task does it"
        )
    # What an execution of another source did is part of what is prepared for.
    before = [
        (each.map_index == env.owner.get("map_index"), manifest)
        for each in run.generations()
        if each.generation != env.generation and each.source == source.to_json()
        if (manifest := run.manifest(each.generation)) is not None
    ]
    if source.goes_on and any(own for own, _ in before):
        log.info("The sink was prepared for the interval from %s; this run goes on.", interval)
        return
    handled = any(manifest.received for own, manifest in before if not own)
    if handled and run.files.list("outcomes"):
        raise PipelineError(
            "batches of other producers of this run were handled already, and prepare_backfill"
            " would undo them: clear all process tasks of the run together"
        )
    log.info("Preparing the sink for the interval from %s.", interval)
    pipeline.prepare_backfill(interval, context_of(pipeline))
