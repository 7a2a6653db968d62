"""Runs a DAG repeatedly during continuous publishing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_broadway import Broadway
from tests.integration.pipelines.running import World
from tests.traffic.accounting import check_reports, count_messages
from tests.traffic.pipelines import PIPELINES
from tests.traffic.publisher import Publisher
from tests.traffic.sink import read_handled

pytestmark = [pytest.mark.airflow, pytest.mark.broker, pytest.mark.slow]

RUNS = 4
BUDGET = {"max_seconds": 2.0, "wait_seconds": 60.0, "idle_seconds": 60.0}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sqlite", "rabbitmq"])
def test_runs_of_a_dag_in_traffic_lose_nothing(kind, open_broker, tmp_path, monkeypatch):
    broker = open_broker(kind)(tmp_path)
    sink = tmp_path / "sink.jsonl"
    pipeline: Broadway = PIPELINES[broker.kind](
        producer=broker.options, context={"sink": str(sink), "run": "dag"}
    )
    world = World(tmp_path, monkeypatch)
    dag: Any = pipeline.dag("traffic", process=BUDGET, default_args={"retries": 0})
    reports = []

    with Publisher(broker.sender(), rate=100.0) as publisher:
        for _ in range(RUNS):
            ran = world.run(dag, BUDGET)
            assert ran.state == "success", ran.states
            reports.append(ran.report)

    summary = count_messages(
        publisher.confirmed, publisher.published, read_handled(sink), broker.drain()
    )
    assert all(report["balanced"] for report in reports)
    check_reports(summary, [report["totals"] for report in reports])
    assert summary.passed, f"{summary}: {json.dumps(reports)}"
    assert summary.handled > 200
