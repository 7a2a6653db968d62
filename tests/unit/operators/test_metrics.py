"""Metrics sent to Airflow's ``Stats``, as documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from airflow_broadway.adapters.metrics import AirflowMetrics
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.runs.metrics import Metric, Metrics
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.tasks import send_depth
from tests.unit.runs.steps import Run, Sums

GUIDE = Path(__file__).parents[3] / "docs" / "operators.md"


@pytest.fixture
def sent(monkeypatch):
    """Kind, name, value and tags of what is sent."""
    calls: list[tuple[str, str, float, dict[str, str]]] = []
    for kind, method in (("counter", "incr"), ("gauge", "gauge"), ("timer", "timing")):

        def send(name, value, tags, kind=kind):
            calls.append((kind, name, value, tags))

        monkeypatch.setattr(f"airflow_broadway.adapters.metrics.Stats.{method}", send)
    return calls


def documented() -> dict[str, str]:
    """The metrics of the guide's table: name and kind."""
    kinds: dict[str, str] = {}
    for names, kind in re.findall(
        r"^\| (`broadway\..*`) \| (\w+) \|", GUIDE.read_text("utf-8"), re.MULTILINE
    ):
        first, *more = re.findall(r"`([\w.]+)`", names)
        stem = first.rpartition(".")[0]
        kinds |= {first: kind, **{stem + name: kind for name in more}}
    return kinds


def test_guide_names_every_metric():
    assert set(documented()) == {metric.value for metric in Metric}


def test_metrics_match_the_guide_and_have_no_ids(tmp_path, sent):
    # Given a run with one message acked immediately, one failed before any batch, one in its own
    run = Run(tmp_path, context={"now": 1}, ports=Ports(metrics=AirflowMetrics()))
    run.send([1, 5, 7])
    reference = run.process()
    watcher = run.watcher()
    watcher.renew()
    watcher.close()
    run.batch(reference)

    # When it is settled
    run.ack()
    Metrics(AirflowMetrics(), pipeline="Sums", dag_id="sums").depth(QueueDepth(3, 0, 0, 0, 60.0))

    # Then what happened is counted, under names and tags without end that the guide has
    counted = {name: value for kind, name, value, _ in sent if kind == "counter"}
    assert counted == {
        "broadway.messages.acked": 1,
        "broadway.messages.dead_lettered": 2,
        "broadway.messages.failed": 1,  # in its batch: the other is counted by its process task
        "broadway.batches": 1,
    }
    kinds = documented()
    for kind, name, _, tags in sent:
        assert kinds[name] == kind
        assert set(tags) <= {"pipeline", "dag_id", "batcher", "trigger"}
    assert {name for _, name, _, _ in sent} >= {
        "broadway.batch.duration",
        "broadway.batch.size",
        "broadway.lease.remaining",
        "broadway.queue.depth",
        "broadway.queue.oldest_age",
    }

    # and once only, though another looks again
    before = [call for call in sent if call[0] == "counter"]
    run.ack()
    assert [call for call in sent if call[0] == "counter"] == before


def test_unknown_age_is_not_sent_as_zero(monkeypatch):
    sent: dict[str, float] = {}
    monkeypatch.setattr(
        AirflowMetrics, "gauge", lambda _, name, value, tags: sent.update({name: value})
    )
    metrics = Metrics(AirflowMetrics(), pipeline="Sums", dag_id="sums")

    metrics.depth(QueueDepth(3, 0, 0, 0, None))
    assert sent == {"broadway.queue.depth": 3}

    metrics.depth(QueueDepth(0, 0, 0, 0, None))  # nothing waits
    assert sent == {"broadway.queue.depth": 0, "broadway.queue.oldest_age": 0.0}


def test_empty_queue_without_ages_sends_no_age_gauge(tmp_path, monkeypatch):
    sent: dict[str, float] = {}
    monkeypatch.setattr(
        AirflowMetrics, "gauge", lambda _, name, value, tags: sent.update({name: value})
    )
    pipeline = Sums(producer={"path": "/none"})
    monkeypatch.setattr(type(pipeline.producer), "reports_oldest_age", False)
    monkeypatch.setattr(
        type(pipeline.producer), "depth", lambda *_: QueueDepth(0, 0, 0, 0, oldest_age=None)
    )

    metrics = Metrics(AirflowMetrics(), pipeline="Sums", dag_id="sums")
    send_depth(pipeline, Ports(), metrics, Run(tmp_path, "r1").staged)

    assert sent == {"broadway.queue.depth": 0}
