"""``airflow-broadway check``: diagnoses the installation, the Dags and pipelines."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement

from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.dag_folders import parse_dags
from airflow_broadway.adapters.staging import env_outside_run, open_store
from airflow_broadway.cli.opening import connected, pipeline_of
from airflow_broadway.cli.output import CommandError, Result, silenced
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.errors import BroadwayError, ConnectionMissing
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import class_path
from airflow_broadway.core.text import printable
from airflow_broadway.core.version import __version__
from airflow_broadway.staging.store import host_name

if TYPE_CHECKING:
    from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
    from airflow_broadway.staging.store import Store

_ORDER: Final = ("error", "warning", "note")
#: What ``init`` writes in place of a secret.
_PLACEHOLDER: Final = "CHANGE-ME"
#: Distributions whose versions are shown.
_SHOWN: Final = ("apache-airflow", "apache-airflow-providers-apache-spark", "pyspark")

Findings = Iterator[Finding]


@silenced()  # tracebacks and logs of clients may contain secrets
def check(args: argparse.Namespace) -> Result:
    """Reports the findings, errors first; the exit code is 1 if there is an error.

    :raises CommandError: If a reference is malformed.
    """
    findings = [*_versions(), *_guarded(_staging, args.staging)]
    references: list[str] = args.pipeline
    tasks: list[Any] = []
    if args.spark or not references:
        dags, errors = parse_dags()
        findings += _import_errors(errors)
        tasks = [task for dag in dags for task in dag.tasks]
        if not references:
            references, notes = _references(tasks)
            findings += notes
        if not references and not errors:
            findings.append(Finding("warning", "no Dag has a pipeline: pass --pipeline REF"))
    started = []
    for reference in references:
        own = [*_guarded(_pipeline, reference, args, tasks)]
        findings += own
        if not any(finding.level == "error" for finding in own):
            started.append(f"A run of {pipeline_of(reference).name} can begin.")
    findings = sorted(dict.fromkeys(findings), key=lambda finding: _ORDER.index(finding.level))
    failed = any(finding.level == "error" for finding in findings)
    lines = [f"{finding.level}: {finding.text}" for finding in findings]
    return Result([finding._asdict() for finding in findings], [*lines, *started], int(failed))


def _guarded(call: Callable[..., Iterable[Finding]], *arguments: Any) -> Findings:
    """Yields the findings of a call; its exception is another one, without a secret.

    :raises CommandError: If the arguments of the command are wrong.
    """
    try:
        yield from call(*arguments)
    except CommandError:
        raise
    except (BroadwayError, OSError) as error:
        yield Finding("error", redacted(printable(error)))
    except (Exception, SystemExit) as error:
        # Raised by user code: its text may contain secrets.
        kind = type(error).__name__
        yield Finding("error", f"{kind} was raised by a pipeline or a client: see a worker's log")


# -- the installation ------------------------------------------------------------------------------


def _versions() -> Findings:
    installed = {name: _version(name) for name in _SHOWN}
    names = ", ".join(f"{name} {number or 'missing'}" for name, number in installed.items())
    yield Finding(
        "note",
        f"airflow-broadway {__version__}, Python {platform.python_version()}, {names},"
        f" on host {host_name()!r}",
    )
    client = _version("pyspark-client")
    if client and installed["pyspark"] and client != installed["pyspark"]:
        yield Finding(
            "error",
            f"pyspark {installed['pyspark']} and pyspark-client {client} share a folder and must"
            f" have one version: pip install pyspark=={client} --force-reinstall",
        )
    for line in requires("airflow-broadway") or ():
        wanted = Requirement(line)
        number = _version(wanted.name)
        if number and not wanted.specifier.contains(number, prereleases=True):
            required = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            yield Finding(
                "error" if required else "warning",
                f"{wanted.name} {number} is installed, and airflow-broadway {__version__} needs"
                f" {wanted.specifier}: pip install '{wanted.name}{wanted.specifier}'",
            )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _staging(staging: str | None) -> Findings:
    from airflow_broadway.runs.reading.hosts import hosts_of, probe_root

    store = open_store(staging)
    probe_root(store)
    others = {host: at for host, at in hosts_of(store).items() if host != host_name()}
    seen = ", ".join(f"{host!r} ({at[:19]} UTC)" for host, at in list(others.items())[:10])
    yield Finding(
        "note",
        f"the staging root {redacted(store.uri)} can be written by host {host_name()!r}; "
        + (
            f"it was also used by {seen}"
            if seen
            else "no other host has used it: run this on another worker too, if there is one"
        ),
    )


def _import_errors(errors: dict[str, str]) -> Findings:
    for path, trace in sorted(errors.items()):
        text = Path(path).read_text("utf-8", "replace") if Path(path).is_file() else ""
        ours = re.search(r"broadway|_pipeline\b", trace + text) is not None
        lines = [line for line in trace.strip().splitlines() if line.strip()]
        yield Finding(
            "error" if ours else "warning",
            f"the Dag file {path} cannot be imported: {redacted(printable(lines[-1]))}",
        )


# -- pipelines -------------------------------------------------------------------------------------


def _references(tasks: list[Any]) -> tuple[list[str], list[Finding]]:
    """Returns the pipelines of tasks, each once, as JSON; without options that have templates."""
    references, notes = [], []
    for task in tasks:
        ref = getattr(task, "pipeline", None)
        if isinstance(ref, dict) and "class" in ref and "options" in ref:
            options = {k: v for k, v in ref["options"].items() if "{{" not in json.dumps(v)}
            references.append(json.dumps({"class": ref["class"], "options": options}))
            for name in sorted(ref["options"].keys() - options.keys()):
                text = (
                    f"{task.dag_id} passes templates in {name!r} of {ref['class']}, which only a"
                    " task can render: what the class declares was checked"
                )
                notes.append(Finding("note", text))
    return list(dict.fromkeys(references)), notes


def _pipeline(reference: str, args: argparse.Namespace, tasks: list[Any]) -> Findings:
    pipeline = pipeline_of(reference)
    yield from _connections(pipeline, args.conn_id)
    producer = connected(pipeline.producer, reference, args.conn_id)
    env = env_outside_run(pipeline.name, args.staging)
    for shard in producer.shards():
        yield from _guarded(shard.check, env)
    for batcher, options in pipeline.batchers.items():
        if options.sink is not None:
            yield from _guarded(_sink, pipeline, batcher)
    if any(options.engine == "spark" for options in pipeline.batchers.values()):
        path = class_path(type(pipeline))
        submitting = [t for t in tasks if hasattr(t, "probe") and t.pipeline["class"] == path]
        if _needs_java(submitting):
            yield from _guarded(_java)
        if args.spark:
            yield from _spark(path, pipeline, args.staging, submitting)


def _connections(pipeline: Pipeline, conn_id: str | None) -> Findings:
    """Finds the connections that still have a placeholder."""
    producer = pipeline.producer
    own = conn_id or next(
        (getattr(producer, field.name) for field in fields(producer) if field.name == "conn_id"),
        None,
    )
    sinks = [options.sink for options in pipeline.batchers.values() if options.sink is not None]
    ids = [own, *(name for sink in sinks for name in sink.connection_ids)]
    for name in dict.fromkeys(filter(None, ids)):
        try:
            connection = AirflowConnections().get(str(name))
        except BroadwayError:
            continue  # reported where it is needed
        values = {field.name: getattr(connection, field.name) for field in fields(connection)}
        places = [key for key, value in values.items() if _PLACEHOLDER in str(value)]
        if places:
            yield Finding(
                "error",
                f"the connection {name!r} has the placeholder {_PLACEHOLDER} in"
                f" {', '.join(places)}: replace it",
            )


def _sink(pipeline: Pipeline, batcher: str) -> Findings:
    from airflow_broadway.runs.sinks import open_sink

    open_sink(pipeline, batcher, AirflowConnections()).close()
    yield from ()


def _needs_java(submitting: list[Any]) -> bool:
    """Returns whether Spark is started here, as far as is known."""
    with suppress(ConnectionMissing):  # reported where it is needed
        return not submitting or not all(task.on_server for task in submitting)
    return True


def _java() -> Findings:
    from airflow_broadway.submit.environment import check_java, find_spark

    program = find_spark("spark-submit", os.environ)
    if program.bundled:
        check_java(os.environ)
    yield Finding("note", f"Spark batches are submitted by {program.binary}")


def _spark(path: str, pipeline: Pipeline, staging: str | None, submitting: list[Any]) -> Findings:
    """Submits an application without batches for each task that submits this pipeline's."""
    if not submitting:
        yield Finding("warning", f"no Dag submits {path} to Spark, so --spark tried nothing")
    for task in submitting:
        yield from _guarded(_probe, task, pipeline, open_store(staging or task.staging))


def _probe(task: BroadwaySparkSubmitOperator, pipeline: Pipeline, store: Store) -> Findings:
    line = task.probe(store, pipeline)
    yield Finding(
        "note", f"the Spark driver of {task.dag_id}.{task.task_id} reads and writes staging: {line}"
    )
