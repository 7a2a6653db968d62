"""A run that nobody looks at any more: its Dag is paused, or its sensor has its last look."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.adapters.host import deployment
from airflow_broadway.runs.heartbeat import HEARTBEAT_TIMEOUT, Heartbeat
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.spark_batches import SparkBatches
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.testing import ManualClock
from tests.unit.runs.steps import TEN, Run, balanced


def context_of(run: Run, started: datetime, states: dict[str, str | None]) -> Any:
    ti = SimpleNamespace(
        dag_id="sums",
        run_id=run.run_id,
        task_id="ack",
        map_index=-1,
        try_number=1,
        start_date=started,
        get_first_reschedule_date=lambda context: None,
        get_task_states=lambda dag_id, run_ids, task_ids: {run_ids[0]: states},
    )
    dag_run = SimpleNamespace(
        run_id=run.run_id,
        run_type="manual",
        start_date=started,
        logical_date=None,
        data_interval_start=None,
        data_interval_end=None,
    )
    dag = SimpleNamespace(task_ids=list(states), tasks=[])
    return {"ti": ti, "dag_run": dag_run, "dag": dag, "params": {}}


def test_a_sensor_that_looks_seldom_is_active_until_its_next_look_is_overdue(tmp_path):
    clock = ManualClock()
    heartbeat = Heartbeat(Run(tmp_path).staged, clock)
    assert not heartbeat.is_fresh()

    for again in (0.0, 300.0):
        heartbeat.beat(again)
        clock.advance(again + HEARTBEAT_TIMEOUT - 1)
        assert heartbeat.is_fresh()
        clock.advance(1)
        assert not heartbeat.is_fresh()


@pytest.mark.parametrize("watched", [False, True])
def test_spark_task_of_a_paused_dag_keeps_the_lease_and_settles(tmp_path, watched):
    # Given a task whose application is about to start; a paused Dag's sensor looks no more
    run = Run(tmp_path, numbers=TEN)
    reference = run.process()
    run.batch(reference)  # what the application records
    heads = Recorded(run.staged).deciding(run.pipeline.batchers, reference["generation"])
    planned = [{"plan": head.path} for head in heads]
    batches = SparkBatches(run.staged, run.pipeline, planned, Ports())
    if watched:
        watcher = run.watcher()
        watcher.heartbeat.beat()
        watcher.close()
    with run.queue() as queue:
        [before] = queue.leases()

    # When it starts
    kept = batches.leases_kept()
    kept.__enter__()
    end = time.monotonic() + 10.0
    deadline = before.lease.deadline
    while not watched and deadline == before.lease.deadline and time.monotonic() < end:
        with run.queue() as queue:
            deadline = queue.leases()[0].lease.deadline
    # Then it renews what nobody else does
    assert (deadline > before.lease.deadline) is not watched

    # And when it has ended, it settles what has an outcome; a sensor that looks does that itself
    kept.__exit__(None, None, None)
    assert (run.depth()[2] == 0) is not watched
    assert balanced(run.ack())
    assert run.depth() == (0, 0, 0, 3)


@pytest.mark.parametrize(("timeout", "settles"), [(3600.0, False), (60.0, True)])
def test_last_look_of_the_sensor_settles_and_releases_the_rest(tmp_path, timeout, settles):
    # Given a run of which one task still works, and a sensor that began two minutes ago
    run = Run(tmp_path, airflow=deployment(), numbers=TEN)
    run.process()
    states: dict[str, str | None] = {"process": "success", "batch.default": "running"}
    sensor = BroadwayAckSensor(
        task_id="ack",
        pipeline=run.pipeline,
        watch=["process", "batch.default"],
        staging=f"file://{tmp_path}/staging",
        timeout=timeout,
        poke_interval=10.0,
    )
    started = datetime.now(UTC) - timedelta(minutes=2)

    # When it looks, and no look comes after it within its time
    assert sensor._check_run(context_of(run, started, states)) is None

    # Then no lease is left: failures are dead letters, unhandled messages are redelivered
    assert run.depth() == ((9, 0, 0, 1) if settles else (0, 0, 10, 0))
