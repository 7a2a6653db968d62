"""Executes tasks as the operators' ``execute`` does, without Airflow.

The operators only translate Airflow's context for :mod:`airflow_broadway.runs`.  A subject may
execute its tasks with the real operators: see :meth:`.subject.Subject.execute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from airflow_broadway.core.model.connections import EnvironmentConnections
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.spark_batches import SparkBatches
from airflow_broadway.runs.tasks import BatchTask, ProcessTask, UnstagedTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing.crashes.callbacks import TaskTimeOut
from airflow_broadway.testing.crashes.interceptor import Interceptor
from airflow_broadway.testing.crashes.spark import Driver, run_batches, submit

# Tasks load these when they have messages.  Here the parent of their processes has them: loading
# takes so long that a lease is extended in some runs, and not in others.
for _name in (
    "runs.dead_letter_table",
    "runs.process",
    "runs.python_batches",
    "runs.sources.archived",
    "runs.sources.past_run",
    "staging.archive.publication",
    "staging.archive.writer",
    "staging.batch_reader",
    "staging.isolation",
    "staging.planner",
    "staging.received",
):
    import_module(f"airflow_broadway.{_name}")

#: The Dag of all runs.
DAG = "crashes"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One task execution, with the scheduler's state.

    :param task: Its name; the index of a mapped task follows a ``!``, except for index 0.
    :param tasks: The tasks of a run, in order.
    :param failed: The tasks of this run that have finally failed.
    :param returned: The results of the other tasks of this run.
    :param runs: The runs by their ids; ``over`` is whether one has ended.
    :param driver: The driver of a task that submits to Spark.
    """

    run_id: str
    task: str
    try_number: int
    tasks: Sequence[str]
    failed: Sequence[str]
    returned: Mapping[str, Any]
    runs: Mapping[str, Any]
    interceptor: Interceptor
    driver: Driver | None

    @property
    def task_id(self) -> str:
        return self.task.partition("!")[0]

    @property
    def index(self) -> int:
        return int(self.task.partition("!")[2] or 0)

    def map_index(self, pipeline: Pipeline) -> int:
        """Returns the map index of the task instance: -1 if the task is not mapped."""
        mapped = self.task_id == "process" and pipeline.producer.concurrency > 1
        return self.index if mapped else -1

    def is_over(self, run_id: str) -> bool:
        """Returns whether a run has ended, or is unknown."""
        return run_id not in self.runs or bool(self.runs[run_id].over)

    def returned_by(self, kind: str) -> list[Any]:
        """Returns the results of tasks whose names begin with ``kind``."""
        return [result for task, result in self.returned.items() if task.startswith(kind)]


def execute(
    pipeline: Pipeline,
    staging: str,
    attempt: Attempt,
    *,
    hold_failed: float,
    source: RunSource | None = None,
) -> Any:
    """Executes a task; returns its reference.  ``None`` from the sensor means: poke again.

    :param staging: URI of the staging root.
    :param hold_failed: Seconds for which the sensor holds the messages of failed tasks.
    :param source: The source of the run's messages; the live queue by default.
    :raises BroadwayError: If it fails.
    """
    run = StagedRun(Store.open(staging), pipeline=pipeline.name, dag_id=DAG, run_id=attempt.run_id)
    ports = Ports(
        connections=EnvironmentConnections(),
        is_over=attempt.is_over,
        interrupts=(TaskTimeOut,),
        max_shutdown=2.0,
    )
    task = Task(
        dag_id=DAG,
        run_id=attempt.run_id,
        task_id=attempt.task_id,
        map_index=attempt.map_index(pipeline),
        try_number=attempt.try_number,
        forks=False,  # callbacks are recorded in this process
    )
    budget = Budget(max_seconds=60.0)
    context = run, pipeline, task, ports
    if attempt.task_id == "process":
        source = source or RunSource()
        process = ProcessTask(*context, index=attempt.index, budget=budget, source=source)
        return process.run().reference
    if attempt.task_id == "run":
        return UnstagedTask(*context, budget=budget).run().reference
    if attempt.task_id in ("poke", "ack"):
        return _poke(attempt, RunWatcher(run, pipeline, ports=ports), hold_failed)
    if attempt.driver is not None:
        planned = [reference for reference in attempt.returned_by("batch.") if reference]
        batches = SparkBatches(run, pipeline, planned, ports)
        arguments = batches, run, pipeline, task, attempt.driver, attempt.interceptor
        return run_batches(batches, lambda: submit(*arguments))
    return _batches(attempt, BatchTask(*context, batcher=attempt.task_id.removeprefix("batch.")))


def _poke(attempt: Attempt, watcher: RunWatcher, hold_failed: float) -> Any:
    is_last = attempt.task_id == "ack"
    try:
        return watcher.look(over=is_last, failed=attempt.failed, hold_failed=hold_failed)
    finally:
        watcher.close()


def _batches(attempt: Attempt, task: BatchTask) -> Any:
    label = f"{attempt.try_number}-{attempt.task_id}"
    plan = task.plan(attempt.returned_by("process"), label=label)
    if plan is None or not plan.messages:
        return None
    counts = task.handle(plan)
    reference = task.reference(plan)
    # The scheduler treats a task that leaves batches without an outcome as failed.
    return reference if counts is None else {**reference, "outcomes": counts}
