"""Executes the tasks of run after run in this process, in the scheduler's place.

``group``: the tasks of a task group, one after another; ``run``: the one task of
``BroadwayRunOperator``.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing

from broadway_pipeline import BUDGET, Rows  # type: ignore[import-not-found]

from airflow_broadway.core.model.connections import EnvironmentConnections
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.tasks import BatchTask, ProcessTask, UnstagedTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store


def execute(kind: str, run_id: str, store: Store) -> None:
    """Executes the tasks of one run; every other run is over."""
    pipeline, budget = Rows(), Budget(**BUDGET)
    ports = Ports(connections=EnvironmentConnections(), is_over=lambda other_id: other_id != run_id)
    staged = StagedRun(store, pipeline=pipeline.name, dag_id="race", run_id=run_id)

    def task(task_id: str) -> Task:
        return Task(dag_id="race", run_id=run_id, task_id=task_id)

    if kind == "run":
        UnstagedTask(staged, pipeline, task("run"), ports, budget=budget).run()
        return
    process = ProcessTask(staged, pipeline, task("process"), ports, budget=budget)
    processed = process.run().reference
    batch = BatchTask(staged, pipeline, task("batch.default"), ports, batcher="default")
    plan = batch.plan([processed], label="1")
    if plan is not None:
        batch.handle(plan)
    with closing(RunWatcher(staged, pipeline, ports=ports)) as watcher:
        watcher.look(over=True, processed=[processed])


if __name__ == "__main__":
    place = Store.open(f"file://{os.environ['RACE_STATE']}/staging")
    while True:
        execute(sys.argv[1], f"run-{time.time_ns()}", place)
