"""``airflow-broadway replay``: run ``handle_batch`` again on staged batches, settling nothing."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow.providers.common.compat.sdk import conf

from airflow_broadway.cli.output import CommandError, cut, one_line, say, say_json, table
from airflow_broadway.cli.runs import find_run, open_root
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.formats.entries import load_line
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref, make_ref
from airflow_broadway.core.text import many
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.replay_folder import StagedBatch, add_result, choose, make_shadow
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.tables import ParquetFile

__all__ = ["add_dag_folders", "read_reference", "replay"]

log = logging.getLogger(__name__)

#: Failed messages that are shown, and kept in JSON for each batch.
SHOWN, KEPT = 20, 1000


def replay(given: argparse.Namespace) -> int:
    """Replay batches of a run; 1 if any message failed or has no outcome."""
    store = open_root(given.staging)
    run = find_run(store, given.dag_id, given.run_id, given.pipeline_name)
    chosen = choose(run, batcher=given.batcher, batch_ids=given.batch_id)
    ref, info = _reference(run, given.pipeline)
    if given.pipeline is None:
        _ask(ref, yes=given.yes)
    add_dag_folders()
    pipeline = load_ref(ref, info)
    _check_batchers(run, pipeline, chosen)
    settings = _settings(given)
    shadow, plans = make_shadow(run, chosen)
    try:
        error = _run_all(shadow, pipeline, ref, info, plans, settings)
    except BroadwayError:
        if not shadow.files.list("outcomes"):  # nothing ran
            shadow.files.remove_all()
        raise
    result = _result(run, shadow, chosen, error)
    add_result(shadow, {name: value for name, value in result.items() if name != "batches"})
    if given.json:
        say_json(result)
    else:
        say(*_text(result))
    return int(bool(result["failed"] or result["without_outcome"] or result["missing"]))


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    """What the Spark operator gets of the arguments."""
    wrong = [each for each in given.conf if "=" not in each]
    if wrong:
        raise CommandError(f"--conf takes NAME=VALUE, got: {wrong[0]!r}")
    return {
        "staging": given.staging,
        "conn_id": given.conn_id,
        "conf": dict(each.split("=", 1) for each in given.conf),
        "py_files": given.py_files,
        "jars": given.jars,
        "packages": given.packages,
    }


# -- the pipeline ----------------------------------------------------------------------------------


def _reference(run: StagedRun, given: str | None) -> tuple[dict[str, Any], RunInfo]:
    """The pipeline's reference, and what its callbacks may know of the run.

    :raises CommandError: If neither the run nor the user names it.
    """
    work = _work(run)
    info = RunInfo(dag_id=run.dag_id, run_id=run.run_id)
    if work is not None:
        info = RunInfo.from_json({**work.run, "try_number": 1})
    if given is not None:
        return make_ref(read_reference(given)), info
    if work is None:
        raise CommandError(
            f"run {run.run_id!r} had no Spark application, so its pipeline is not on record: give"
            f" --pipeline pkg.module:Class (the one named {run.pipeline!r})"
        )
    return work.pipeline, info


def _ask(ref: Mapping[str, Any], *, yes: bool) -> None:
    """Say what a staged file would have this process import, and let the user decide.

    Who may write into the staging folder must not choose the code that runs here.

    :raises CommandError: If the user does not say yes, or nobody is there to ask.
    """
    said = f"The run's staged files name the pipeline {one_line(str(ref['class']))}"
    if ref.get("options"):
        said += f" with the options {json.dumps(ref['options'])}"
    sys.stderr.write(f"{said}.\n")
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(
            "nothing was imported: give --yes if that is the pipeline, or name it yourself with"
            " --pipeline"
        )
    sys.stderr.write("Import it, and run its handle_batch here? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was imported")


def read_reference(text: str) -> Any:
    """What ``--pipeline`` names: ``pkg.module:Class``, or a reference as JSON.

    :raises CommandError: If it is neither.
    """
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"--pipeline is no JSON: {error}") from None


def _work(run: StagedRun) -> Work | None:
    """What the run's last Spark application was given."""
    found = [re.fullmatch(r".+-(\d+)\.json", name) for name in run.files.list("work")]
    names = sorted((int(match[1]), match[0]) for match in found if match)
    if not names:
        return None
    path = f"work/{names[-1][1]}"
    return Work.loads(run.files.read(path), path)


def add_dag_folders() -> None:
    """Let this process import what lies beside Dag files, as Airflow's own processes do."""
    try:
        bundles = json.loads(conf.get("dag_processor", "dag_bundle_config_list", fallback="[]"))
    except ValueError:
        bundles = []
    folders = [
        conf.get("core", "dags_folder", fallback=""),
        *((each.get("kwargs") or {}).get("path") for each in bundles if isinstance(each, Mapping)),
        conf.get("core", "plugins_folder", fallback=""),
    ]
    for folder in folders:
        if folder and folder not in sys.path and Path(folder).is_dir():
            sys.path.append(str(folder))


def _check_batchers(run: StagedRun, pipeline: Pipeline, chosen: Sequence[StagedBatch]) -> None:
    """Refuse a pipeline that cannot handle these batches.

    :raises CommandError: If it lacks a batcher, or has it for another engine.
    """
    for plan in {each.plan.path: each.plan for each in chosen}.values():
        batcher = pipeline.batchers.get(plan.batcher)
        if batcher is None:
            raise CommandError(
                f"the pipeline {pipeline.name!r} has no batcher {plan.batcher!r}; it has"
                f" {sorted(pipeline.batchers)}"
            )
        staged = _engine(run, plan)
        if staged not in (None, batcher.engine):
            raise CommandError(
                f"the batches of {plan.batcher!r} were staged for engine={staged!r}, and the"
                f" pipeline now has engine={batcher.engine!r}: replay them with the class as it was"
            )


def _engine(run: StagedRun, plan: BatchPlan) -> str | None:
    """For which engine a plan's data was staged; ``None`` if it has none."""
    for name in plan.data:
        path = f"{plan.path}/{name}"
        if run.files.exists(path):
            with ParquetFile(run.files, path) as file:
                return "python" if "_flush" in file.columns else "spark"
    return None


# -- running ---------------------------------------------------------------------------------------


class _PythonReplay(PythonBatches):
    """Batches of a Python batcher whose messages are nobody's to settle."""

    def settle_now(
        self, generation: str, entries: list[Entry]
    ) -> tuple[SettleReport, list[Entry], list[Entry]]:
        count = many(len(entries), "message")
        log.info("ack_immediately of %s: a replay settles nothing.", count)
        return SettleReport(), entries, []


def _run_all(
    shadow: StagedRun,
    pipeline: Pipeline,
    ref: dict[str, Any],
    info: RunInfo,
    plans: Sequence[BatchPlan],
    settings: dict[str, Any],
) -> str:
    """Run the plans, those of Spark in one application; returns what it ended with, if badly."""
    python = [each for each in plans if pipeline.batchers[each.batcher].engine == "python"]
    for plan in python:
        _PythonReplay(shadow, pipeline, plan).run()
    spark = [each for each in plans if each not in python]
    if not spark:
        return ""
    from airflow_broadway.cli.spark import run_on_spark

    return run_on_spark(shadow, ref, info, spark, settings)


# -- what came of it -------------------------------------------------------------------------------


def _result(
    run: StagedRun, shadow: StagedRun, chosen: Sequence[StagedBatch], error: str
) -> dict[str, Any]:
    batches = [_batch(shadow, each) for each in chosen]
    now = [each["now"] or {} for each in batches]
    return {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "replay": shadow.run_id,
        "path": f"{shadow.store.uri}/{shadow.path}",
        **{
            name: sum(each.get(name, 0) for each in now)
            for name in ("successful", "failed", "missing")
        },
        "without_outcome": sum(each["now"] is None for each in batches),
        "error": error,
        "batches": batches,
    }


def _batch(shadow: StagedRun, chosen: StagedBatch) -> dict[str, Any]:
    plan, planned, before = chosen
    path = paths.outcome(plan.path, planned.batch_id)
    now: Outcome | None = None
    if shadow.files.exists(path):
        now = Outcome.loads(shadow.files.read(path), path)
    return {
        "batcher": plan.batcher,
        "batch_id": planned.batch_id,
        "batch_key": planned.batch_key,
        "size": planned.size,
        "before": _counts(before),
        "now": _counts(now),
        "failures": _failures(shadow, now),
    }


def _counts(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    names = ("successful", "failed", "missing", "error", "seconds")
    return {name: getattr(outcome, name) for name in names}


def _failures(shadow: StagedRun, outcome: Outcome | None) -> list[dict[str, str]]:
    path = None if outcome is None else outcome.exceptions
    found: list[dict[str, str]] = []
    for text in () if path is None else entry_lines(shadow.files, path):
        entry = load_line(text).entry
        if entry.verdict.reason:
            found.append({"message_id": entry.message_id, "reason": entry.verdict.reason})
        if len(found) >= KEPT:
            break
    return found


def _text(result: Mapping[str, Any]) -> list[str]:
    batches = result["batches"]
    rows = []
    for each in batches:
        now, before = each["now"] or {}, each["before"] or {}
        rows.append(
            (
                each["batcher"],
                each["batch_id"],
                each["size"],
                now.get("successful"),
                now.get("failed"),
                before.get("failed"),
                cut(now.get("error") or "") or None,
            )
        )
    heads = ("batcher", "batch", "size", "succeeded", "failed", "failed before", "error")
    done = f"{many(result['successful'], 'message')} succeeded, {result['failed']:,} failed"
    lines = [
        f"Replayed {many(len(batches), 'batch')} of run {result['run_id']}: {done}.",
        "Nothing was settled at the broker, and the run's own outcomes stand.",
        "",
        *table(heads, rows),
    ]
    failures = [failure for each in batches for failure in each["failures"]]
    if failures:
        lines += ["", "Failed in this replay:"]
        lines += [f"  {each['message_id']}: {cut(each['reason'])}" for each in failures[:SHOWN]]
        if result["failed"] > SHOWN:
            lines.append(f"  and {result['failed'] - SHOWN} more: --json has them")
    if result["missing"]:
        lines += ["", f"{many(result['missing'], 'message')} got no result from handle_batch."]
    if result["without_outcome"]:
        lines += [
            "",
            f"{many(result['without_outcome'], 'batch')} without an outcome: see the log above.",
        ]
    if result["error"]:
        lines += ["", f"Spark ended with: {one_line(result['error'])}"]
    return [*lines, "", f"Its files, until retention removes them: {result['path']}"]
