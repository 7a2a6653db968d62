"""What a run of small batches asks of a bucket: a Python batcher, staging on S3 (moto, loopback).

Requests are what S3 counts, and bills; the seconds are those of a server that answers at once.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

from tests.benchmarks.figures import Figures, folder_of_its_own
from tests.s3_runs import requests_of_a_run
from tests.s3_server import s3_server

#: Messages, and messages in a batch.
SIZES = ((100_000, 1_000), (100_000, 100), (10_000, 10))


def bench_s3(sizes: tuple[tuple[int, int], ...] = SIZES) -> Figures:
    """The figures of staging on S3, for ``build/bench.json``."""
    pa.array([1])  # where pandas is installed, Arrow imports it now
    with s3_server() as server:
        return [figure for size in sizes for figure in _figures(server, *size)]


def _figures(server: Any, messages: int, batch_size: int) -> Figures:
    name, batches = f"s3.{messages}.by_{batch_size}", messages // batch_size
    figures: Figures = []
    total = 0
    with folder_of_its_own() as folder:
        begun = time.perf_counter()
        steps = requests_of_a_run(server, folder, messages=messages, batch_size=batch_size)
        for step, requests in steps:
            total += requests.total()
            figures.append(_requests(f"{name}.{step}", requests.total()))
        seconds = time.perf_counter() - begun
    figures.append(_requests(name, total))
    figures.append(_requests(f"{name}.a_batch", round(total / batches, 2)))
    figures.append({"name": f"{name}.run", "value": round(messages / seconds), "unit": "msg/s"})
    return figures


def _requests(name: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "requests"}
