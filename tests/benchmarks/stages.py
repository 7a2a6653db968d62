"""Runs one stage of a run in a separate process; prints its time and peak memory as JSON.

``python -m tests.benchmarks.stages STAGE '{"folder": …}'``; :func:`run_stage` calls it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref

RUN = {"dag_id": "bench", "run_id": "bench"}


class Stage(NamedTuple):
    """The measured cost of one stage.

    :param seconds: The duration without the start of the interpreter.
    :param peak: The peak resident size of its largest process in bytes.
    :param cpu: CPU seconds, including child processes.
    :param started: The start of the work on the monotonic clock, which all processes share.
    """

    seconds: float
    peak: int
    result: Any
    cpu: float
    started: float


def run_stage(name: str, **given: Any) -> Stage:
    """Runs a stage in a separate process."""
    from tests.benchmarks.figures import measure  # loads Airflow's client, which stages do not need

    return Stage(**measure("stages", name, **given))


def run_batches(given: dict[str, Any]) -> tuple[list[Stage], Stage]:
    """Plans and runs the batches of a run."""
    plans = [run_stage("plan", batcher=name, **given) for name in ("even", "odd")]
    return plans, run_stage("spark", plans=[plan.result["plan"] for plan in plans], **given)


def run_synthetic(count: int) -> Stage:
    """Runs the process stage with synthetic messages."""
    from tests.benchmarks.figures import temporary_folder

    options = {"producer": {"messages": count}}
    ref = {"class": "tests.benchmarks.synthetic:SyntheticPipeline", "options": options}
    with temporary_folder() as folder:
        return run_stage("process", max_messages=count, folder=str(folder), ref=ref)


def _pipeline(ref: dict[str, Any]) -> Pipeline:
    return load_ref(ref, RunInfo())


def _staged(folder: str, pipeline: Pipeline) -> Any:
    from airflow_broadway.staging.run_folder import StagedRun
    from airflow_broadway.staging.store import Store

    store = Store.open(f"file://{folder}/staging")
    return StagedRun(store, pipeline=pipeline.name, dag_id=RUN["dag_id"], run_id=RUN["run_id"])


def _process(
    folder: str, ref: dict[str, Any], index: int = 0, max_messages: int | None = None
) -> Any:
    import pyarrow.parquet

    from airflow_broadway.core.stages.receiving import Budget
    from airflow_broadway.runs.process import Process

    pipeline = _pipeline(ref)
    run = _staged(folder, pipeline)
    owner = {**RUN, "task_id": "process", "map_index": index, "try_number": 1}
    env = ProducerEnv(
        pipeline=pipeline.name,
        generation=uuid.uuid4().hex,
        owner=owner,
        clock=SystemClock(),
        staging=f"{run.store.uri}/{pipeline.name}",
    )
    # Loads lazy imports before the measurement, including pandas, which the first array imports.
    pipeline.producer.custodian(env).close()
    pyarrow.array([""])
    return lambda: Process(run, pipeline, env=env, budget=Budget(max_messages=max_messages)).run()


def _plan(folder: str, ref: dict[str, Any], batcher: str) -> Any:
    from airflow_broadway.staging.planner import plan_batches

    pipeline = _pipeline(ref)
    run = _staged(folder, pipeline)
    generations = [record.generation for record in run.generations()]

    def work() -> dict[str, Any]:
        plan = plan_batches(run, pipeline, batcher, generations, try_label="1")
        return {"plan": plan.path, "batches": plan.batches, "messages": plan.messages}

    return work


def _spark(folder: str, ref: dict[str, Any], plans: list[str]) -> Any:
    from airflow_broadway import __version__
    from airflow_broadway.core.formats import paths
    from airflow_broadway.core.formats.work import Work

    pipeline = _pipeline(ref)
    run = _staged(folder, pipeline)
    work = Work(
        name="bench",
        try_number=1,
        pipeline=ref,
        run=RunInfo().to_json(),
        plans=plans,
        package_version=__version__,
    )
    run.files.create(paths.of_try("bench", 1), work.dumps())
    command = [
        str(Path(sys.executable).parent / "spark-submit"),
        *("--master", "local[2]", "--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
        str(Path(__file__).parents[2] / "airflow_broadway" / "spark" / "launcher.py"),
        *("--run", run.spark_uri(), "--work", paths.of_try("bench", 1), "--sha256", work.digest),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def submit() -> None:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])

    return submit


def _settle(folder: str, ref: dict[str, Any]) -> Any:
    from airflow_broadway.runs.watch import RunWatcher

    pipeline = _pipeline(ref)
    run = _staged(folder, pipeline)

    def work() -> dict[str, Any]:
        settler = RunWatcher(run, pipeline)
        settler.settle(final=True)
        report = settler.report(failed_tasks=[])
        settler.close()
        if not report["balanced"] or report["totals"]["released"]:
            raise RuntimeError(f"the run does not balance: {report['totals']}")
        return dict(report["totals"])

    return work


STAGES: dict[str, Callable[..., Any]] = {
    "process": _process,
    "plan": _plan,
    "spark": _spark,
    "settle": _settle,
}


def main() -> None:
    """Runs the stage that the command line names."""
    name, text = sys.argv[1:]
    work = STAGES[name](**json.loads(text))
    before, started = _cpu(), time.monotonic()
    result = work()
    seconds, cpu = time.monotonic() - started, _cpu() - before
    peak = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    peak *= 1 if sys.platform == "darwin" else 1024
    print(json.dumps(Stage(seconds, peak, result, cpu, started)._asdict()))


def _cpu() -> float:
    """Returns the CPU seconds so far, including ended child processes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
