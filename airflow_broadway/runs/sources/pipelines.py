"""Combines a pipeline with the producer that serves a source of messages.

A process task chooses the source (:mod:`.choice`) and records it in each of its generations.  Every
later task reads that record.  So all tasks use the same source, and messages of another source are
settled at their own.  Before a past interval is handled again, the sink is prepared.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian
from airflow_broadway.core.errors import LeaseLapsed, PipelineError, RequestRefused
from airflow_broadway.core.formats import paths
from airflow_broadway.core.model.run_source import KINDS, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.callbacks import context_of
from airflow_broadway.runs.ports import Ports, producer_env
from airflow_broadway.runs.sinks import delete_interval, time_sinks
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun

log = logging.getLogger(__name__)


def with_source(pipeline: Pipeline, source: RunSource) -> Pipeline:
    """Returns a pipeline with the producer that serves a source, and with ``run.source`` set.

    :param pipeline: The pipeline as loaded, with its own producer.
    :raises RequestRefused: If no producer serves the source.
    """
    if pipeline.run.source == source:
        return pipeline
    if source.kind not in KINDS:
        raise RequestRefused(
            f"nothing serves the source {source.kind!r} of the producer {pipeline.producer.kind!r}"
        )
    copied = copy.copy(pipeline)
    copied.__dict__.pop("_context", None)  # the result of ``setup`` may depend on the source
    if not source.asks_broker:
        from airflow_broadway.runs.sources.archived import PastProducer  # loads pyarrow

        copied.producer = cast("Producer", PastProducer(pipeline, source))
    copied.run = replace(pipeline.run, source=source)
    return copied


def source_of(run: StagedRun, generations: Collection[str]) -> RunSource:
    """Reads the source of generations of a run that were planned together."""
    for name in generations:
        with suppress(FileNotFoundError):
            path = paths.generation(name)
            return RunSource.from_json(GenerationRecord.loads(run.read_once(path), path).source)
    return RunSource()


def pipeline_of(pipeline: Pipeline, record: GenerationRecord) -> Pipeline:
    """Returns the pipeline with the producer that delivered a generation."""
    return with_source(pipeline, RunSource.from_json(record.source))


def prepare_sink(run: StagedRun, pipeline: Pipeline, env: ProducerEnv) -> None:
    """Prepares the sinks of a backfill; only the first of its producers does so.

    Deletes the rows of the interval in sinks with a time column; then calls ``prepare_backfill``.

    The process task calls it once per run, immediately before it publishes its manifest: before any
    batch of the run, on every engine, and also if the interval has no messages.

    :raises LeaseLapsed: If a newer execution of the task has begun.
    :raises PipelineError: If batches of the run, which the callback would undo, were handled.
    :raises Exception: Any exception of the callback.
    """
    source = pipeline.run.source
    interval = source.interval
    if interval is None or env.index:
        return
    if not pipeline.defines("prepare_backfill") and not time_sinks(pipeline):
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
    delete_interval(pipeline, env, interval)
    pipeline.prepare_backfill(interval, context_of(pipeline))


@dataclass
class Custodians:
    """Opens one custodian per source of generations; for use by one thread.

    :param owner: The owner that settles; default: the owner of the generation's lease.
    """

    pipeline: Pipeline
    ports: Ports
    staged: StagedRun
    owner: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._opened: list[tuple[dict[str, Any], Custodian]] = []

    def of(self, record: GenerationRecord) -> Custodian:
        """Returns the custodian of a generation's messages."""
        for source, custodian in self._opened:
            if source == record.source:
                return custodian
        pipeline = pipeline_of(self.pipeline, record)
        opened: Custodian = pipeline.producer.custodian(
            producer_env(
                pipeline,
                self.ports,
                generation=record.generation,
                owner=self.owner or record.lease["owner"],
                store=self.staged.store,
                clock=self.staged.clock,
            )
        )
        self._opened.append((record.source, opened))
        return opened

    def close(self) -> None:
        """Releases connections; idempotent."""
        for _, custodian in self._opened:
            custodian.close()
        self._opened.clear()
