"""The producer of a pipeline that a command names, and what it is opened in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.dag_folders import add_dag_folders
from airflow_broadway.cli.output import CommandError
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.formats.layout import SHARED
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref, make_ref


def pipeline_of(reference: str) -> Pipeline:
    """The pipeline that an argument names: ``pkg.module:Class``, or a reference as JSON.

    :raises PipelineError: If its class cannot be imported here.
    :raises OptionsError: If one of its options breaks its rule.
    """
    add_dag_folders()
    return load_ref(make_ref(_read_reference(reference)), RunInfo())


def _read_reference(text: str) -> Any:
    """Returns what ``--pipeline`` names: ``pkg.module:Class``, or a reference as JSON.

    :raises CommandError: If it is neither.
    """
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"--pipeline is no JSON: {error}") from None


def named_pipeline(references: Sequence[str], name: str | None) -> tuple[str, Pipeline]:
    """Of several pipelines that of a name, with its reference: a pipeline says its name itself.

    :param name: ``None``: there is one, whatever its name.
    :raises CommandError: If none of them has the name, or several are given and no name.
    """
    if name is None and len(references) > 1:
        raise CommandError("several pipelines are given: --named says which of them it is")
    names: list[str] = []
    first: BroadwayError | None = None
    for reference in references:
        try:
            pipeline = pipeline_of(reference)
        except BroadwayError as error:  # another of them may be the one
            first = first or error
            continue
        if name in (None, pipeline.name):
            return reference, pipeline
        names.append(pipeline.name)
    if first is not None:
        raise first
    raise CommandError(f"none of these pipelines is named {name!r}: they are {sorted(names)}")


def connected(producer: Producer, reference: str, conn_id: str | None) -> Producer:
    """A pipeline's producer, of whatever kind, with the connection that a command wants.

    :raises CommandError: If one of its options is a template, which only a task can fill in.
    """
    names = [each.name for each in fields(producer)]
    for name in names:
        value = getattr(producer, name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, str) and "{{" in each:
                raise CommandError(
                    f"the producer of {reference} has the template {name}={each!r}: give the"
                    ' pipeline as JSON, with {"class": …, "options": {"producer": {…}}}'
                )
    if conn_id is None:
        return producer
    if "conn_id" not in names:
        raise CommandError(f"{type(producer).__name__} has no connection: leave --conn-id out")
    changed: Producer = replace(producer, conn_id=conn_id)  # type: ignore[call-arg]
    return changed


def producer_env(pipeline: str, root: str) -> ProducerEnv:
    """Returns what a pipeline's producer is opened in, outside a run.

    :param pipeline: The pipeline's name.
    :param root: The URI of the staging root.
    """
    root = root.rstrip("/")
    return ProducerEnv(
        pipeline=pipeline,
        connections=AirflowConnections(),
        staging=f"{root}/{pipeline}",
        shared=f"{root}/{SHARED}",
    )
