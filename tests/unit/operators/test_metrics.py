"""What is sent to Airflow's ``Stats``, and what the guide says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.adapters.metrics import AirflowMetrics
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.runs.metrics import Metric, Metrics
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.tasks import send_depth
from tests.unit.runs.steps import Run, Sums

GUIDE = Path(__file__).parents[3] / "docs" / "operators.md"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, float, dict[str, str]]]:
    """Kind, name, value and tags of what is sent."""
    found: list[tuple[str, str, float, dict[str, str]]] = []
    for kind, method in (("counter", "incr"), ("gauge", "gauge"), ("timer", "timing")):

        def send(name: str, value: float, tags: Any, kind: str = kind) -> None:
            found.append((kind, name, value, tags))

        monkeypatch.setattr(f"airflow_broadway.adapters.metrics.Stats.{method}", send)
    return found


def told() -> dict[str, str]:
    """The metrics of the guide's table: name and kind."""
    kinds: dict[str, str] = {}
    for names, kind in re.findall(
        r"^\| (`broadway\..*`) \| (\w+) \|", GUIDE.read_text("utf-8"), re.MULTILINE
    ):
        first, *more = re.findall(r"`([\w.]+)`", names)
        stem = first.rpartition(".")[0]
        kinds |= {first: kind, **{stem + name: kind for name in more}}
    return kinds


def test_the_guide_names_every_metric_there_is() -> None:
    assert set(told()) == {metric.value for metric in Metric}


def test_what_is_sent_is_of_the_kind_that_the_guide_says_and_has_no_ids(
    tmp_path: Path, sent: list[tuple[str, str, float, dict[str, str]]]
) -> None:
    # Given a run of which one message is acked at once, one fails before any batch, one in its own
    run = Run(tmp_path, context={"now": 1}, ports=Ports(metrics=AirflowMetrics()))
    with run.queue() as queue:
        queue.send([b"1", b"5", b"7"])
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
    kinds = told()
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
    before = [each for each in sent if each[0] == "counter"]
    run.ack()
    assert [each for each in sent if each[0] == "counter"] == before


def test_an_age_that_is_not_known_is_not_sent_as_0(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, float] = {}
    monkeypatch.setattr(
        AirflowMetrics, "gauge", lambda _, name, value, tags: sent.update({name: value})
    )
    metrics = Metrics(AirflowMetrics(), pipeline="Sums", dag_id="sums")

    metrics.depth(QueueDepth(3, 0, 0, 0, None))
    assert sent == {"broadway.queue.depth": 3}

    metrics.depth(QueueDepth(0, 0, 0, 0, None))  # nothing waits
    assert sent == {"broadway.queue.depth": 0, "broadway.queue.oldest_age": 0.0}


def test_an_empty_queue_of_a_broker_without_ages_leaves_no_gauge_of_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, float] = {}
    monkeypatch.setattr(
        AirflowMetrics, "gauge", lambda _, name, value, tags: sent.update({name: value})
    )
    pipeline = Sums(producer={"path": "/none"})
    monkeypatch.setattr(type(pipeline.producer), "tells_age", False)
    monkeypatch.setattr(
        type(pipeline.producer), "depth", lambda *_: QueueDepth(0, 0, 0, 0, oldest_age=None)
    )

    metrics = Metrics(AirflowMetrics(), pipeline="Sums", dag_id="sums")
    send_depth(pipeline, Ports(), metrics, Run(tmp_path, "r1").staged)

    assert sent == {"broadway.queue.depth": 0}
