"""Pipelines and producers named by command-line arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from airflow_broadway.adapters.dag_folders import add_dag_folders
from airflow_broadway.cli.output import CommandError
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.errors import BroadwayError, PipelineError
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref, make_ref


def pipeline_of(reference: str) -> Pipeline:
    """Loads the pipeline of an argument: ``pkg.module:Class``, or a reference as JSON.

    :raises PipelineError: If its class cannot be imported here.
    :raises OptionsError: If one of its options breaks its rule.
    """
    failures = add_dag_folders()
    try:
        return load_ref(make_ref(_read_reference(reference)), RunInfo())
    except PipelineError as error:
        raise PipelineError(".  ".join([str(error), *failures])) from error


def _read_reference(text: str) -> Any:
    """Parses ``--pipeline``: ``pkg.module:Class``, or a reference as JSON.

    :raises CommandError: If it is neither.
    """
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"--pipeline is no JSON: {error}") from None


def named_pipeline(references: Sequence[str], name: str | None) -> tuple[str, Pipeline]:
    """Selects the pipeline with this name; returns its reference and the pipeline.

    :param name: ``None`` if there is one reference only.
    :raises CommandError: If no pipeline has the name, or several are given without a name.
    """
    if name is None and len(references) > 1:
        raise CommandError("several pipelines are given: choose one with --named")
    names: list[str] = []
    first: BroadwayError | None = None
    for reference in references:
        try:
            pipeline = pipeline_of(reference)
        except BroadwayError as error:  # another reference may match
            first = first or error
            continue
        if name in (None, pipeline.name):
            return reference, pipeline
        names.append(pipeline.name)
    if first is not None:
        raise first
    raise CommandError(f"none of these pipelines is named {name!r}: they are {sorted(names)}")


def connected(producer: Producer, reference: str, conn_id: str | None) -> Producer:
    """Returns a pipeline's producer, with ``--conn-id`` applied.

    :raises CommandError: If one of its options is a template, which only a task can render.
    """
    names = [field.name for field in fields(producer)]
    for name in names:
        value = getattr(producer, name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, str) and "{{" in item:
                raise CommandError(
                    f"the producer of {reference} has the template {name}={item!r}: pass the"
                    ' pipeline as JSON, with {"class": …, "options": {"producer": {…}}}'
                )
    if conn_id is None:
        return producer
    if "conn_id" not in names:
        raise CommandError(f"{type(producer).__name__} has no connection: omit --conn-id")
    return replace(producer, conn_id=conn_id)  # type: ignore[call-arg]
