"""References to pipelines: the import path of the class, and the options passed to it.

Each process that runs a part of a pipeline rebuilds it from its reference; nothing else of it is
serialized.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any

from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.model.rules import JSON
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline

#: The names under which Airflow loads Dag files; they exist in no other program.
_DAG_MODULE = re.compile(r"unusual_prefix_[0-9a-f]+_(?P<stem>.+)")
#: The prefix of a reference to such a class, since the digits change with the file's folder.
_DAG_FILE = "dag-file/"


def make_ref(pipeline: object) -> dict[str, Any]:
    """Returns the reference of an operator's ``pipeline``: a class, an instance,
    ``"pkg.module:Class"`` or a reference.

    :raises OptionsError: If it is none of these, an override is not JSON, or the class cannot be
        imported by its name.
    """
    if isinstance(pipeline, type) and issubclass(pipeline, Pipeline):
        pipeline = pipeline()
    if isinstance(pipeline, Pipeline):
        if not JSON.holds(pipeline.overrides):
            rule = "JSON values (declare functions in the class instead)"
            raise OptionsError("options", rule, pipeline.overrides)
        return {"class": class_path(type(pipeline)), "options": pipeline.overrides}
    if isinstance(pipeline, str) and re.fullmatch(r"[\w./-]+:[\w.]+", pipeline):
        return {"class": pipeline, "options": {}}
    if isinstance(pipeline, Mapping) and isinstance(pipeline.get("class"), str):
        return {"class": pipeline["class"], "options": dict(pipeline.get("options", {}))}
    raise OptionsError(
        "pipeline", 'a Broadway subclass, an instance of one, or "pkg.module:Class"', pipeline
    )


def load_ref(ref: Mapping[str, Any], run: RunInfo | None = None) -> Pipeline:
    """Builds the pipeline of a rendered reference.

    :param run: The run information for its callbacks; by default :class:`RunInfo`'s defaults.
    :raises PipelineError: If its class cannot be imported here; names the module and the cause.
    :raises OptionsError: If an option, once rendered, breaks its rule.
    """
    return import_class(str(ref["class"])).from_rendered(ref.get("options", {}), run)


def class_path(cls: type[Pipeline]) -> str:
    """Returns ``"pkg.module:Class"``; for a class of a Dag file ``"dag-file/<stem>:Class"``.

    :raises OptionsError: If the class is local to a function, or of ``__main__``.
    """
    if "<locals>" in cls.__qualname__ or cls.__module__ == "__main__":
        raise OptionsError(
            "pipeline",
            "a class at the top level of an importable module (other processes import it by name)",
            f"{cls.__module__}:{cls.__qualname__}",
        )
    match = _DAG_MODULE.fullmatch(cls.__module__)
    module = f"{_DAG_FILE}{match['stem']}" if match else cls.__module__
    return f"{module}:{cls.__qualname__}"


def is_dag_file(path: str) -> bool:
    """Returns whether a path names a class of a Dag file, which no Spark driver can import."""
    return path.startswith(_DAG_FILE)


def import_class(path: str) -> type[Pipeline]:
    """Imports the class of a path made by :func:`class_path`.

    :raises PipelineError: If it cannot be imported, or is not a pipeline.
    """
    module_name, _, qualname = path.partition(":")
    target: Any = _dag_module(module_name) if is_dag_file(path) else _import(module_name)
    for part in qualname.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise PipelineError(
                f"module {module_name!r} has no {qualname!r} (looked for the pipeline {path!r})"
            ) from None
    if not (isinstance(target, type) and issubclass(target, Pipeline)):
        raise PipelineError(f"{path!r} is no subclass of airflow_broadway.Broadway: {target!r}")
    return target


def _import(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PipelineError(
            f"the pipeline's module {name!r} cannot be imported by {sys.executable}: {error}."
            " Install it there, or move it to a module of its own next to the Dag files"
        ) from error


def _dag_module(name: str) -> object:
    stem = name[len(_DAG_FILE) :]
    for known, module in list(sys.modules.items()):
        match = _DAG_MODULE.fullmatch(known)
        if match and match["stem"] == stem:
            return module
    raise PipelineError(
        f"the Dag file {stem!r} is not loaded in this process; move the pipeline's class to a"
        " module of its own"
    )
