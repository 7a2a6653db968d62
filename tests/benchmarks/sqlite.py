"""The throughput of the embedded queue."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.producers.sqlite import SqliteQueue

#: Bytes per body: about the size of a flight as JSON.
SIZE = 300
#: Messages per call of ``send`` and ``receive``.
PORTION = 5_000
#: Documented throughput on two cores in messages per second.
TARGETS = {"sqlite.send": 100_000, "sqlite.receive_settle": 50_000}


def bench_sqlite(messages: int = 100_000) -> list[dict[str, Any]]:
    """Measures messages per second of sending, receiving, and receiving and settling."""
    with tempfile.TemporaryDirectory() as folder:
        queue = SqliteQueue(Path(folder) / "bench.db", "bench")
        body = b"x" * SIZE

        def send() -> None:
            for _ in range(messages // PORTION):
                queue.send([body] * PORTION)

        def receive() -> None:
            while queue.receive("bench", PORTION):
                pass

        def settle() -> None:
            assert queue.settle("bench", Settlement(rest=ACK, expected=messages)).acked == messages

        sending, receiving, settling = (_seconds(step) for step in (send, receive, settle))
        queue.close()
    return [
        _figure("sqlite.send", messages / sending),
        _figure("sqlite.receive", messages / receiving),
        _figure("sqlite.settle", messages / settling),
        _figure("sqlite.receive_settle", messages / (receiving + settling)),
    ]


def _seconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _figure(name: str, value: float) -> dict[str, Any]:
    figure: dict[str, Any] = {"name": name, "value": round(value), "unit": "msg/s"}
    if name in TARGETS:
        figure["target"] = TARGETS[name]
    return figure
