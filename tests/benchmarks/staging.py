"""The cost of staging rows of ten columns on a local disk, in one process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_broadway import Broadway
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.stages.staged_row import RowConverter
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.writer import ProcessWriter
from tests.unit.staging.kit import (
    batches_of,
    manifest_of,
    message,
    open_generation,
    open_run,
    pipeline_of,
)

MESSAGES = 100_000
CHUNK = 500
KEYS = (10, 1_000, 100_000)
SCHEMA = (
    "origin string, dest string, year int, month int, delay double, distance double,"
    " flight bigint, carrier string, cancelled boolean, tail string"
)


def _chunk(start: int, keys: int) -> list[Message]:
    return [
        message(
            n,
            {
                "origin": "EWR",
                "dest": f"D{n % 100}",
                "year": 2013,
                "month": 1 + n % 12,
                "delay": n * 0.5,
                "distance": 1000.0,
                "flight": n,
                "carrier": "UA",
                "cancelled": False,
                "tail": f"N{n}",
            },
            batcher="b",
            batch_key=f"key-{n * 7919 % keys}",
            metadata={"queue": "flights"},
            size=250,
            at=start / MESSAGES,
        )
        for n in range(start, start + CHUNK)
    ]


def _stage(run: StagedRun, pipeline: Broadway, keys: int) -> tuple[str, float, float]:
    """Stages messages; returns the generation, and the seconds of converting and writing."""
    generation = open_generation(run).generation
    rows = RowConverter(pipeline)
    converting = writing = 0.0
    with ProcessWriter(run, generation, pipeline) as writer:
        for start in range(0, MESSAGES, CHUNK):
            chunk = _chunk(start, keys)
            started = time.perf_counter()
            result = [rows(message) for message in chunk]
            middle = time.perf_counter()
            writer.messages(result)
            converting += middle - started
            writing += time.perf_counter() - middle
        started = time.perf_counter()
        written = writer.close()
        writing += time.perf_counter() - started
    made_of: dict[str, Any] = {"batchers": written.batchers, "files": written.files}
    run.publish(manifest_of(run, generation, MESSAGES, **made_of))
    return generation, converting, writing


def _figure(name: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": round(MESSAGES / seconds), "unit": "msg/s", **more}


def _figures(root: Path) -> Iterator[dict[str, Any]]:
    pa.array([1])  # imports pandas, if installed
    spark = pipeline_of(b=Batcher(schema=SCHEMA))
    merged = pipeline_of(b=Batcher(schema=SCHEMA, merge_keys=True))
    for keys in KEYS:
        run = open_run(root, f"keys:{keys}")
        generation, converting, writing = _stage(run, spark, keys)
        if keys == KEYS[0]:
            yield _figure("staging.convert", converting)
            yield _figure("staging.write", writing)
            yield _figure("staging.convert_and_write", converting + writing)
        plain = 0.0
        for pipeline, suffix in ((spark, ""), (merged, ".merged")):
            started = time.perf_counter()
            plan = plan_batches(run, pipeline, "b", [generation], try_label="1")
            seconds = time.perf_counter() - started
            name = f"staging.plan.{keys}_keys"
            more: dict[str, Any] = {"batches": plan.batches}
            if suffix:
                more |= {"ratio": round(plain / seconds, 3), "of": name}
            plain = seconds
            yield _figure(name + suffix, seconds, **more)
    python = pipeline_of(
        b=Batcher(schema=SCHEMA, engine="python", batch_size=100, batch_timeout=None)
    )
    run = open_run(root, "python")
    generation, _, _ = _stage(run, python, 10)
    plan = plan_batches(run, python, "b", [generation], try_label="1")
    started = time.perf_counter()
    with BatchReader(run, plan) as reader:
        count = sum(len(reader.read(batch)) for batch in batches_of(run, plan))
    assert count == MESSAGES
    yield _figure("staging.read", time.perf_counter() - started, batches=plan.batches)


def bench_staging() -> list[dict[str, Any]]:
    """Measures the figures of staging."""
    with tempfile.TemporaryDirectory() as folder:
        return list(_figures(Path(folder)))
