"""A task's identity in staging and at its broker, and the ports' defaults."""

from __future__ import annotations

import pytest

from airflow_broadway.core.errors import ConnectionMissing
from airflow_broadway.runs.ports import Ports, Task, producer_env
from tests.unit.runs.steps import Run


def task(task_id: str, map_index: int = -1) -> Task:
    return Task(dag_id="d", run_id="r", task_id=task_id, map_index=map_index)


def test_task_file_names_are_distinct_and_portable():
    tasks = [task("g.batch"), task("g.batch", 0), task("g.batch", 1), task("g.batch_0")]

    names = [task.file_name for task in tasks]

    assert names == ["g.batch", "g.batch!0", "g.batch!1", "g.batch_0"]
    assert task("ä/b").file_name == "__b"


def test_default_ports_know_no_connection_and_no_finished_run():
    ports = Ports()

    with pytest.raises(ConnectionMissing, match="'warehouse' is not defined"):
        ports.connections.get("warehouse")
    assert not ports.is_over("another")


def test_producer_env_has_pipeline_folder_and_task(tmp_path):
    run = Run(tmp_path)

    env = producer_env(
        run.pipeline,
        run.ports,
        generation="g",
        owner=task("process", 3).owner(),
        index=3,
        store=run.staged.store,
    )

    assert env.staging == f"file://{tmp_path}/staging/Sums"
    assert (env.generation, env.index, env.owner["map_index"]) == ("g", 3, 3)
    assert env.connections is run.ports.connections
