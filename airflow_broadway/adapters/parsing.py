"""Validates a pipeline while a Dag is parsed, without importing a module for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import import_class, is_dag_file, make_ref


def pipeline_ref(pipeline: object, task: str = "") -> dict[str, Any]:
    """Returns the reference that an operator stores, validated as far as parsing allows, with a
    summary of the pipeline: readers of the Dag need not import its class.

    A class passed as text is not imported, and has no summary.

    :param task: The kind of the operator's task, such as ``"process"``.  A serialized Dag has only
        an operator's class, which may be a subclass that is not importable.
    :raises OptionsError: Naming the option and the rule.
    """
    ref = make_ref(pipeline)
    if task:
        ref["task"] = task
    known = declared(ref)
    if known is None:
        return ref
    known.check_callbacks(known.batchers)
    if known.archive is not None and find_spec("deltalake") is None:
        raise OptionsError(
            "archive",
            "None where deltalake is not installed (pip install 'airflow-broadway[delta]')",
            known.archive,
        )
    summary = {
        "name": known.name,
        "broker": known.producer.kind or type(known.producer).__name__,
        "producers": known.producer.concurrency,
        "batchers": {name: batcher.engine for name, batcher in known.batchers.items()},
    }
    return {**ref, "about": summary}


def declared(ref: Mapping[str, Any]) -> Pipeline | None:
    """Returns a reference's pipeline while a Dag is parsed; ``None`` if its module is not imported.

    Importing it would be work at parse time.
    """
    path = str(ref["class"])
    if is_dag_file(path) or path.partition(":")[0] in sys.modules:
        return import_class(path)(**ref["options"])
    return None


def check_engine(ref: Mapping[str, Any]) -> None:
    """Refuses a Spark batcher of a class that no Spark driver can import.

    :raises OptionsError: Naming the module to move the class to.
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
            f" {name} to a module of its own next to the Dag file, such as"
            f" {name.lower()}_pipeline.py, and import it from there",
            "spark",
        )


#: Settings that belong to the connection: their places.
_OF_CONNECTION = {"spark.master": "the connection's host", "spark.submit.deployMode": "deploy_mode"}


def check_submission(arguments: Mapping[str, Any]) -> None:
    """Checks the ``deploy_mode`` and the ``conf`` of a submitting operator.

    :raises OptionsError: If the mode is unknown, or a setting belongs to the connection.
    """
    mode, conf = arguments.get("deploy_mode"), arguments.get("conf")
    if mode not in (None, "client", "cluster"):
        raise OptionsError("deploy_mode", "'client' or 'cluster'", mode)
    for name, place in _OF_CONNECTION.items():
        if isinstance(conf, Mapping) and name in conf:
            raise OptionsError(f"conf.{name}", f"no value: set {place} instead", conf[name])
