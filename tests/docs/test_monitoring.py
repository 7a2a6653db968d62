"""The dashboard and the alerts know the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow._shared.observability.metrics.statsd_logger import SafeStatsdLogger

from airflow_broadway.adapters import metrics as adapter
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.runs.metrics import Metric, Metrics

DOCS = Path(__file__).parents[2] / "docs"
FILES = DOCS / "monitoring"
#: What Prometheus makes of a timer: a summary.
SUMMARY = re.compile(r"(_sum|_count)$")


def exported(metric: str) -> str:
    """A name as statsd_exporter makes it of one with Airflow's prefix."""
    return "airflow_" + metric.replace(".", "_")


def expressions() -> dict[str, str]:
    """Where a query stands → the query."""
    rules = yaml.safe_load((FILES / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
    panels = json.loads((FILES / "dashboard.json").read_text("utf-8"))["panels"]
    return {rule["alert"]: rule["expr"] for rule in rules} | {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels
        for target in panel["targets"]
    }


@pytest.mark.parametrize("place", expressions())
def test_queries_use_existing_metrics(place):
    metrics = {
        SUMMARY.sub("", name) for name in re.findall(r"airflow_broadway\w*", expressions()[place])
    }

    assert metrics
    assert metrics <= {exported(metric.value) for metric in Metric}


def test_every_metric_has_a_panel():
    text = (FILES / "dashboard.json").read_text("utf-8")

    assert [metric for metric in Metric if exported(metric.value) not in text] == []


def test_query_labels_are_existing_tags(monkeypatch):
    # Given Airflow's StatsD, with tags as the page sets it up
    lines: list[str] = []

    class Client:
        def incr(self, stat: str, count: int, rate: float) -> None:
            lines.append(stat)

        def gauge(self, stat: str, value: float, rate: float, delta: bool) -> None:
            lines.append(stat)

        def timing(self, stat: str, value: float) -> None:
            lines.append(stat)

    stats = SafeStatsdLogger(Client(), influxdb_tags_enabled=True, statsd_influxdb_enabled=True)
    monkeypatch.setattr(adapter, "Stats", stats)

    # When a run sends what it sends
    metrics = Metrics(adapter.AirflowMetrics(), pipeline="Orders", dag_id="orders")
    metrics.settled(SettleReport(acked=1, lapsed=2))
    metrics.depth(QueueDepth(1, 0, 0, 0, oldest_age=2.0))
    metrics.count(Metric.BATCHES, 1, batcher="late", trigger="size")
    metrics.seconds(Metric.BATCH_DURATION, 1.5, batcher="late")

    # Then each line has the labels by which it is asked for
    assert len(lines) == 6
    assert all(",pipeline=Orders,dag_id=orders" in line for line in lines)
    assert "broadway.messages.acked,pipeline=Orders,dag_id=orders" in lines
    assert "broadway.batches,pipeline=Orders,dag_id=orders,batcher=late,trigger=size" in lines
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", " ".join(expressions().values()))
    labels = {label.strip() for labels in grouped for label in labels.split(",")}
    assert labels <= {"pipeline", "dag_id", "batcher", "trigger"}


def test_the_page_explains_each_alert_and_no_other():
    page = (DOCS / "monitoring.md").read_text("utf-8")
    rules = yaml.safe_load((FILES / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
    tested = (FILES / "alerts_test.yml").read_text("utf-8")

    alerts = [rule["alert"] for rule in rules]
    assert re.findall(r"^\| `(Broadway\w+)` \|", page, re.MULTILINE) == alerts
    assert [alert for alert in alerts if f"alertname: {alert}" not in tested] == []
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_panels_do_not_overlap_and_name_their_source():
    panels: list[Any] = json.loads((FILES / "dashboard.json").read_text("utf-8"))["panels"]

    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert [panel["title"] for panel in panels if not panel["description"]] == []


def test_prometheus_accepts_the_alert_rules():
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool, of Prometheus, is not installed")
    done = subprocess.run(
        [program, "test", "rules", str(FILES / "alerts_test.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
