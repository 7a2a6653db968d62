"""Executes the tasks of run after run, in the scheduler's place.

``group``: the tasks of a task group, one after another; ``run``: the one task of
``BroadwayRunOperator``.  A number after it: so many runs at a time, each in a process.
"""

from __future__ import annotations

import itertools
import os
import signal
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


def execute(kind: str, run_id: str, running: tuple[str, ...], store: Store) -> None:
    """Executes the tasks of one run.

    :param running: How the ids of the runs of other processes begin; all else are over.
    """
    pipeline, budget = Rows(), Budget(**BUDGET)
    ports = Ports(
        connections=EnvironmentConnections(),
        is_over=lambda other: other != run_id and not other.startswith(running),
    )
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


def main(kind: str, runs: int) -> None:
    """Executes runs until one fails; that ends the whole process group."""
    place = Store.open(f"file://{os.environ['RACE_STATE']}/staging")
    alive = f"run-{time.time_ns()}-"
    number = next((number for number in range(runs) if not os.fork()), None)
    if number is None:
        os.wait()
        os.killpg(0, signal.SIGKILL)
    for count in itertools.count():
        run_id = f"{alive}{number}-{count}"
        # A process executes its runs one after another.
        others = tuple(f"{alive}{other}-" for other in range(runs) if other != number)
        execute(kind, run_id, others, place)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
