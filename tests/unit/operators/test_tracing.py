"""Spans of tasks, by the tracer that Airflow configures."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.adapters import tracing
from airflow_broadway.core import telemetry
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.producers import SqliteProducer, SqliteQueue
from tests.unit.operators.context import task_context


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path="/given")
    processors = Processors(concurrency=1)  # processes the messages in the queue's order
    batchers = {"default": Batcher(engine="python")}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, info: Any, context: Any) -> Any:
        return messages


def parent(number: int) -> str:
    """The ``traceparent`` of a publisher's span."""
    return f"00-{number:032x}-{number:016x}-01"


@pytest.fixture
def spans(monkeypatch):
    """The exporter of finished spans; tracing is on."""
    limits = SpanLimits(max_links=1000)  # the SDK would drop more than its own limit
    exporter, provider = InMemorySpanExporter(), TracerProvider(span_limits=limits)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the process task on messages with these headers; returns its output."""
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    pipeline = Orders(producer={"path": f"{tmp_path}/queue.db"})

    def run(*headers: str | None) -> Any:
        with SqliteQueue(tmp_path / "queue.db", "orders") as queue:
            queue.send([(b"", {"traceparent": h} if h else {}) for h in headers])
        process = BroadwayProcessorOperator(task_id="process", pipeline=pipeline, idle_seconds=0.0)
        return process.execute(task_context("one")), pipeline

    return run


def links(exporter: InMemorySpanExporter) -> list[int]:
    [span] = exporter.get_finished_spans()
    return [link.context.trace_id for link in span.links]


def test_receiving_span_is_linked_to_the_publishers_of_its_messages(spans, run):
    run(parent(1), None, parent(2), "00-invalid", parent(1))

    [span] = spans.get_finished_spans()
    assert (span.name, span.kind) == ("process Orders", trace.SpanKind.CONSUMER)
    assert [link.context.trace_id for link in span.links] == [1, 2]
    assert span.attributes["messaging.system"] == "sqlite"
    assert span.attributes["broadway.received"] == 5
    assert span.status.is_unset


def test_links_are_bounded(spans, run):
    run(*map(parent, range(1, 201)))

    assert len(set(links(spans))) == len(links(spans)) == tracing.MAX_LINKS
    assert telemetry.wanted() == []


def test_so_many_messages_are_read_at_most(spans, run, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_READ", 3)
    run(None, None, parent(3), parent(4))

    assert links(spans) == [3]


def test_span_of_a_failed_task_has_no_text_of_the_error(spans, run):
    with pytest.raises(ZeroDivisionError), tracing.receiving_span(Orders()):
        raise ZeroDivisionError("secret")

    [span] = spans.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (
        trace.StatusCode.ERROR,
        "ZeroDivisionError",
    )
    assert span.events == ()


def test_span_of_airflow_gets_the_counts_of_a_batch_task(spans, run):
    reference, pipeline = run(None, None)
    batch = BroadwayBatcherOperator(
        task_id="batch", pipeline=pipeline, batcher="default", processed=[reference]
    )

    with trace.get_tracer("airflow").start_as_current_span("worker.batch"):
        batch.execute(task_context("one"))

    attributes = spans.get_finished_spans()[-1].attributes
    assert (attributes["broadway.messages"], attributes["broadway.successful"]) == (2, 2)


def test_no_message_is_read_while_tracing_is_off(run, monkeypatch):
    monkeypatch.setattr(SqliteProducer, "header_of", None)
    monkeypatch.setattr(telemetry, "attach", None)

    assert run(parent(1))[0]["received"] == 1
