"""``airflow-broadway replay``: run ``handle_batch`` again on staged batches, settling nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from airflow_broadway.adapters.dag_folders import add_dag_folders
from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import CommandError, cut, one_line, say, say_json
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import load_ref, make_ref
from airflow_broadway.core.text import many, table
from airflow_broadway.runs.inspect import find_run
from airflow_broadway.runs.replay import (
    Replayed,
    ReplayedBatch,
    check_batchers,
    choose,
    staged_pipeline,
)
from airflow_broadway.runs.replay import replay as replay_batches
from airflow_broadway.staging.run_folder import StagedRun

#: Failed messages that are shown; JSON has more.
SHOWN = 20


def replay(given: argparse.Namespace) -> int:
    """Replay batches of a run; 1 if any message failed or has no outcome."""
    store = open_existing_store(given.staging)
    run = find_run(store, given.dag_id, given.run_id, given.pipeline_name)
    chosen = choose(run, batcher=given.batcher, batch_ids=given.batch_id)
    ref, info = _reference(run, given.pipeline)
    if given.pipeline is None:
        _ask(ref, yes=given.yes)
    add_dag_folders()
    pipeline = load_ref(ref, info)
    check_batchers(run, pipeline, chosen)
    settings = _settings(given)

    def on_spark(target: StagedRun, plans: Sequence[BatchPlan]) -> str:
        from airflow_broadway.cli.spark import run_on_spark

        return run_on_spark(target, ref, info, plans, settings)

    result = replay_batches(run, pipeline, chosen, on_spark)
    if given.json:
        say_json(asdict(result))
    else:
        say(*_text(result))
    return int(bool(result.failed or result.without_outcome or result.missing))


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
    staged = staged_pipeline(run)
    if given is not None:
        return make_ref(read_reference(given)), staged.info
    if staged.ref is None:
        raise CommandError(
            f"run {run.run_id!r} had no Spark application, so its pipeline is not on record: give"
            f" --pipeline pkg.module:Class (the one named {run.pipeline!r})"
        )
    return staged.ref, staged.info


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


# -- what came of it -------------------------------------------------------------------------------


def _text(result: Replayed) -> list[str]:
    done = f"{many(result.successful, 'message')} succeeded, {result.failed:,} failed"
    lines = [
        f"Replayed {many(len(result.batches), 'batch')} of run {result.run_id}: {done}.",
        "Nothing was settled at the broker, and the run's own outcomes stand.",
        "",
        *_batch_table(result.batches),
    ]
    failures = [failure for each in result.batches for failure in each.failures]
    if failures:
        lines += ["", "Failed in this replay:"]
        lines += [f"  {each['message_id']}: {cut(each['reason'])}" for each in failures[:SHOWN]]
        if result.failed > SHOWN:
            lines.append(f"  and {result.failed - SHOWN} more: --json has them")
    if result.missing:
        lines += ["", f"{many(result.missing, 'message')} got no result from handle_batch."]
    if result.without_outcome:
        lines += [
            "",
            f"{many(result.without_outcome, 'batch')} without an outcome: see the log above.",
        ]
    if result.error:
        lines += ["", f"Spark ended with: {one_line(result.error)}"]
    return [*lines, "", f"Its files, until retention removes them: {result.path}"]


def _batch_table(batches: Sequence[ReplayedBatch]) -> list[str]:
    rows = [
        (
            each.batcher,
            each.batch_id,
            each.size,
            None if each.now is None else each.now.successful,
            None if each.now is None else each.now.failed,
            None if each.before is None else each.before.failed,
            None if each.now is None else cut(each.now.error) or None,
        )
        for each in batches
    ]
    heads = ("batcher", "batch", "size", "succeeded", "failed", "failed before", "error")
    return table(heads, rows)
