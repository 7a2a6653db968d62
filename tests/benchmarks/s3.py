"""Requests to a bucket by runs with small batches: a Python batcher, staging in S3 (moto).

S3 bills by requests; the seconds are without network latency.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

from airflow_broadway.producers.sqlite import SqliteQueue
from tests.benchmarks.figures import Figures, median, temporary_folder
from tests.s3_runs import put_past_runs, requests_of_a_run, requests_of_tasks
from tests.s3_server import s3_server

#: Numbers of messages, and messages per batch.
SIZES = ((100_000, 1_000), (100_000, 100), (10_000, 10))
#: Past runs in the bucket.
PAST = (10, 1_000, 10_000)
#: Runs with a measured settlement.
TRIES = 7


def bench_s3(sizes: tuple[tuple[int, int], ...] = SIZES) -> Figures:
    """Measures the figures of staging in S3."""
    pa.array([1])  # imports pandas, if installed
    with s3_server() as server:
        figures = [figure for size in sizes for figure in _figures(server, *size)]
        return figures + [figure for past in PAST for figure in _measure_growth(server, past)]


def _measure_growth(server: Any, past: int) -> Figures:
    """Counts the requests of runs of two producers after a number of past runs; times ``ack``."""
    figures: Figures = []
    uri = server.root()
    put_past_runs(uri, past)
    with temporary_folder() as folder, SqliteQueue(folder / "queue.db", "sums") as queue:
        queue.create()
        runs = [
            requests_of_tasks(server, uri, folder, f"run-{number}", messages=0, batch_size=1)
            for number in range(TRIES + 1)
        ]
        seconds = [run["ack"].seconds for run in runs[1:]]  # without the warm-up
        figures.append(median(f"s3.ack.past_{past}", seconds, "s", digits=3))
        for name, messages in (("empty", 0), ("100k", 100_000)):
            for start in range(0, messages, 10_000):
                queue.send([b"%d" % number for number in range(start, start + 10_000)])
            steps = requests_of_tasks(
                server, uri, folder, name, messages=messages, batch_size=17_000
            )
            total = sum(requests.total() for requests in steps.values())
            figures.append(_requests(f"s3.requests.{name}.past_{past}", total))
    return figures


def _figures(server: Any, messages: int, batch_size: int) -> Figures:
    name, batches = f"s3.{messages}.by_{batch_size}", messages // batch_size
    figures: Figures = []
    total = 0
    with temporary_folder() as folder:
        started = time.perf_counter()
        steps = requests_of_a_run(server, folder, messages=messages, batch_size=batch_size)
        for step, requests in steps:
            total += requests.total()
            figures.append(_requests(f"{name}.{step}", requests.total()))
        seconds = time.perf_counter() - started
    figures.append(_requests(name, total))
    figures.append(_requests(f"{name}.a_batch", round(total / batches, 2)))
    figures.append({"name": f"{name}.run", "value": round(messages / seconds), "unit": "msg/s"})
    return figures


def _requests(name: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "requests"}
