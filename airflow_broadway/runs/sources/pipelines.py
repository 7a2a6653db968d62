"""A pipeline as one source of messages wants it: with the producer that serves that source.

A process task chooses the source (:mod:`.choice`), and each of its generations records it.  Every
later task goes by the record, so that all agree, and what another source delivered to a run before
is settled where it came from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Custodian
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.model.run_source import ARCHIVE, DEAD_LETTERS, LIVE, LOG, RUN, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.ports import Ports, producer_env
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun


def _its_own(pipeline: Pipeline, source: RunSource) -> Producer:
    own: Producer = pipeline.producer
    return own


def _of_archive(pipeline: Pipeline, source: RunSource) -> Producer:
    from airflow_broadway.runs.sources.archived import of_archive

    return of_archive(pipeline, source)


def _of_run(pipeline: Pipeline, source: RunSource) -> Producer:
    from airflow_broadway.runs.sources.past_run import of_run

    return of_run(pipeline, source)


#: The producer that serves a source, made of the pipeline as it is loaded.
_PRODUCERS: Final[Mapping[str, Callable[[Pipeline, RunSource], Producer]]] = {
    ARCHIVE: _of_archive,
    DEAD_LETTERS: _its_own,  # they are sent back first: see .dead_letters
    LIVE: _its_own,
    LOG: _its_own,
    RUN: _of_run,
}


def with_source(pipeline: Pipeline, source: RunSource) -> Pipeline:
    """The pipeline with the producer that serves a source; its callbacks see it in ``run.source``.

    :param pipeline: As it is loaded: with its own producer.
    :raises RequestRefused: If nothing serves it.
    """
    if pipeline.run.source == source:
        return pipeline
    serve = _PRODUCERS.get(source.kind)
    if serve is None:
        raise RequestRefused(
            f"nothing serves the source {source.kind!r} of the producer {pipeline.producer.kind!r}"
        )
    made = copy.copy(pipeline)
    made.__dict__.pop("_context", None)  # what ``setup`` makes may go by the source
    made.producer = serve(pipeline, source)
    made.run = replace(pipeline.run, source=source)
    return made


def source_of(run: StagedRun, generations: Collection[str]) -> RunSource:
    """The source of some generations of a run, of which one task made batches."""
    for name in generations:
        if run.files.exists(paths.generation(name)):
            return RunSource.from_json(run.generation(name).source)
    return RunSource()


def pipeline_of(pipeline: Pipeline, record: GenerationRecord) -> Pipeline:
    """The pipeline with the producer that delivered a generation."""
    return with_source(pipeline, RunSource.from_json(record.source))


class Custodians:
    """Opens a custodian for each source that generations came from; for one thread.

    :param owner: Who settles; that of the generation's lease unless given.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ports: Ports,
        run: StagedRun,
        *,
        owner: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._ports = ports
        self._run = run
        self._owner = owner
        self._clock = clock or run.clock
        self._opened: list[tuple[dict[str, Any], Custodian]] = []

    def of(self, record: GenerationRecord) -> Custodian:
        """The custodian of a generation's messages."""
        for source, custodian in self._opened:
            if source == record.source:
                return custodian
        pipeline = pipeline_of(self._pipeline, record)
        made: Custodian = pipeline.producer.custodian(
            producer_env(
                pipeline,
                self._ports,
                generation=record.generation,
                owner=self._owner or record.lease["owner"],
                store=self._run.store,
                clock=self._clock,
            )
        )
        self._opened.append((record.source, made))
        return made

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        for _, custodian in self._opened:
            custodian.close()
        self._opened.clear()
