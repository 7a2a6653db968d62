"""The CPU cost per message of the core: no I/O, ``max_demand=500``."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.adapters.tracing import receiving_span
from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Tally
from airflow_broadway.core.local.engine import Engine
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.schema.encoding import encode_metadata
from airflow_broadway.core.stages.batcher import BatcherStage
from airflow_broadway.core.stages.processor import ProcessorStage
from airflow_broadway.testing import DummyProducer

MESSAGES = 100_000

#: Messages per chunk with Broadway's default of ``max_demand``.
DEFAULT_CHUNK = 5


class Identity(Broadway):
    """Returns messages unchanged."""

    producer = DummyProducer()
    processors = Processors(concurrency=1, max_demand=500)
    batchers = {"default": Batcher(engine="python", batch_size=1000, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class ThreePuts(Identity):
    """Calls three ``put_…`` methods per message."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data(b"").put_batch_key("key").put_batcher("default")


def _messages(pipeline: Broadway, count: int = MESSAGES) -> list[Message]:
    acknowledger = AckRef(RunAcknowledger(pipeline.producer, Tally()), "bench")
    return [
        Message(b"data", message_id=f"m-{number}", acknowledger=acknowledger, position=number)
        for number in range(count)
    ]


def _best(work: Callable[[], object], tries: int = 5) -> float:
    """Returns the seconds of the fastest try, which has the least noise."""
    best = float("inf")
    for _ in range(tries):
        gc.collect()
        gc.disable()
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
        gc.enable()
    return best


def _whole(kind: type[Broadway]) -> float:
    """Returns microseconds per message of process, batch and ack bookkeeping."""
    pipeline = kind()
    messages = _messages(pipeline)

    def work() -> None:
        engine = Engine(pipeline, clock=SystemClock())
        engine.run([messages])
        assert not engine.failed

    return _best(work) / MESSAGES * 1e6


def _process(pipeline: Broadway, chunk: int = 250) -> float:
    """Returns microseconds per message of the process stage."""
    stage = ProcessorStage(pipeline)
    messages = _messages(pipeline)
    chunks = [messages[start : start + chunk] for start in range(0, MESSAGES, chunk)]

    def work() -> None:
        for part in chunks:
            stage.handle(part)

    return _best(work) / MESSAGES * 1e6


def _traced(pipeline: Broadway) -> tuple[float, float]:
    """Returns microseconds per message of the process stage, without and with a span and links.

    Each message has a different ``traceparent``.
    """
    stage = ProcessorStage(pipeline)
    messages = [
        Message(
            b"data",
            metadata={"attributes": {"traceparent": f"00-{number:032x}-{number:016x}-01"}},
            message_id=f"m-{number}",
            position=number,
        )
        for number in range(1, MESSAGES + 1)
    ]

    def work() -> None:
        with receiving_span(pipeline):
            for start in range(0, MESSAGES, 250):
                stage.handle(messages[start : start + 250])

    off = _best(work)
    with mock.patch.object(trace, "get_tracer", TracerProvider().get_tracer):
        return off / MESSAGES * 1e6, _best(work) / MESSAGES * 1e6


def _batch(keys: int) -> float:
    """Returns microseconds per message of the batcher with this number of keys."""
    messages = [
        Message(b"data", batch_key=number % keys, position=number) for number in range(MESSAGES)
    ]
    options = Batcher(engine="python", batch_size=1000)

    def work() -> None:
        stage = BatcherStage("default", options)
        for start in range(0, MESSAGES, 250):
            stage.add(messages[start : start + 250], start / 1e6)
        stage.flush()

    return _best(work) / MESSAGES * 1e6


def _telemetry_checks(chunk: int) -> float:
    """Returns microseconds per message of checking for telemetry handlers, twice per chunk."""
    calls = 100_000

    def work() -> None:
        for _ in range(calls):
            telemetry.observed("processor")

    return _best(work) / calls * 2 / chunk * 1e6


#: Typical metadata of a message: six fields of different types.
METADATA = {
    "routing_key": "orders.eu.created",
    "priority": 5,
    "user_id": None,
    "persistent": True,
    "tags": ["web", "eu"],
    "headers": {"kind": "order", "version": 3},
}


def _metadata(encode: Callable[[Any], object]) -> float:
    """Returns microseconds per message of serializing its metadata."""
    calls = 20_000

    def work() -> None:
        for _ in range(calls):
            encode(METADATA)

    return _best(work) / calls * 1e6


def bench_core() -> list[dict[str, Any]]:
    """Measures the figures of the core."""
    process = _process(Identity())
    small = _process(Identity(), DEFAULT_CHUNK)
    checks, small_checks = _telemetry_checks(250), _telemetry_checks(DEFAULT_CHUNK)
    handler = telemetry.attach(lambda event, measurements, metadata: None)
    result = _process(Identity())
    telemetry.detach(handler)
    untraced, traced = _traced(Identity())
    figures = {
        "core.identity": _whole(Identity),
        "core.three_puts": _whole(ThreePuts),
        "core.process": process,
        "core.process.small_chunks": small,
        "core.process.told": result,
        "core.batch.1_key": _batch(1),
        "core.batch.100000_keys": _batch(100_000),
        "core.metadata": _metadata(encode_metadata),
    }
    return [
        *(
            {"name": name, "value": round(value, 3), "unit": "µs/msg"}
            for name, value in figures.items()
        ),
        {
            "name": "core.process.traced",
            "value": round(traced, 3),
            "unit": "µs/msg",
            "ratio": round(traced / untraced, 4),
            "of": "the same without tracing",
        },
        {
            "name": "core.telemetry.unattached",
            "value": round(checks, 5),
            "unit": "µs/msg",
            "ratio": round(checks / process, 5),
            "of": "core.process",
        },
        {
            "name": "core.telemetry.unattached.small_chunks",
            "value": round(small_checks, 5),
            "unit": "µs/msg",
            "ratio": round(small_checks / small, 5),
            "of": "core.process.small_chunks",
        },
    ]
