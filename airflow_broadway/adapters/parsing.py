"""What is checked of a pipeline while a Dag is parsed: without loading a module for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import import_class, is_dag_file, make_ref


def pipeline_ref(pipeline: object, task: str = "") -> dict[str, Any]:
    """The reference that an operator stores, checked as far as parsing may, with what is known of
    the pipeline then: who only reads the Dag need not import its class.

    A class that was given as text is not imported, and nothing is known of it.

    :param task: What the operator's task does, such as ``"process"``.  A stored Dag tells of an
        operator its own class alone, which may be a subclass that nobody can import.
    :raises OptionsError: Naming the option and the rule.
    """
    ref = make_ref(pipeline)
    if task:
        ref["task"] = task
    known = declared(ref)
    if known is None:
        return ref
    known.check_callbacks(known.batchers)
    about = {
        "name": known.name,
        "broker": known.producer.kind or type(known.producer).__name__,
        "producers": known.producer.concurrency,
        "batchers": {name: each.engine for name, each in known.batchers.items()},
    }
    return {**ref, "about": about}


def declared(ref: Mapping[str, Any]) -> Pipeline | None:
    """The pipeline of a reference while a Dag is parsed; ``None`` if its module is not loaded yet.

    Loading it then would be work at import.
    """
    path = str(ref["class"])
    if is_dag_file(path) or path.partition(":")[0] in sys.modules:
        return import_class(path)(**ref["options"])
    return None


def check_engine(ref: Mapping[str, Any]) -> None:
    """Refuse a Spark batcher of a class that no Spark driver could import.

    :raises OptionsError: Saying where to move the class.
    """
    path = str(ref["class"])
    if not is_dag_file(path):
        return
    pipeline = declared(ref)
    spark = [n for n, b in (pipeline.batchers if pipeline else {}).items() if b.engine == "spark"]
    if spark:
        name = path.partition(":")[2]
        raise OptionsError(
            f"batchers.{spark[0]}.engine",
            f"'python' for a pipeline of a Dag file, which Spark cannot import: move the class"
            f" {name} to a module of its own beside the Dag file, such as"
            f" {name.lower()}_pipeline.py, and import it from there",
            "spark",
        )
