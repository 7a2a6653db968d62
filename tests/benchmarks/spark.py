"""The cost of a batch in a running session, compared with Spark alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.spark import failed
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.frame import BatchFrames
from airflow_broadway.spark.session import ClassicSessions
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.unit.spark.session import spark_session

#: Batches per measurement, and messages per batch.
BATCHES, MESSAGES = 20, 1_000


def bench_spark() -> list[dict[str, Any]]:
    """Measures milliseconds per batch, best of two."""
    spark = spark_session()
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as name:
        folder = Path(name)
        staged = Staged(folder / "frames")
        plan = staged.plan("default", _planned())
        frames = BatchFrames(staged.uri, plan)
        from airflow_broadway.core.formats.plan import BatchPlan

        first = next(BatchPlan.read(staged.files, plan.path)[1])
        session = spark.newSession()
        number = iter(range(10_000))

        def write_bare() -> None:
            target = f"{folder}/bare/{next(number)}"
            frames.messages(session, first).select("message_id", "data.n").write.parquet(target)

        def write(messages: Any, info: BatchInfo) -> None:
            target = info.path(f"file://{folder}/lake")
            messages.select("message_id", "data.n").write.mode("overwrite").parquet(target)

        figures = {
            "spark.new_session": _milliseconds(spark.newSession),
            "spark.frame": _milliseconds(lambda: frames.messages(session, first)),
            "spark.write": _milliseconds(write_bare),
            "spark.batch.driver_only": _batches(folder / "idle", lambda messages, info: None),
            "spark.batch.write": _batches(folder / "write", write),
            "spark.batch.some_failed": _batches(
                folder / "failed", lambda messages, info: failed(messages.where("data.n < 10"))
            ),
        }
    result = [
        {"name": name, "value": round(value, 1), "unit": "ms"} for name, value in figures.items()
    ]
    result[4] |= {
        "ratio": round(figures["spark.batch.write"] / figures["spark.write"], 2),
        "of": "spark.write",
    }
    return result


def _planned() -> list[Planned]:
    return [Planned(f"b{n}", rows(MESSAGES, prefix=f"b{n}-"), batch_key=n) for n in range(BATCHES)]


def _milliseconds(step: Callable[[], object]) -> float:
    return min(_timed(lambda: [step() for _ in range(BATCHES)]) for _ in range(2)) / BATCHES


def _batches(folder: Path, callback: Callable[[Any, BatchInfo], Any]) -> float:
    """Returns milliseconds per batch of an application, without the start of its session."""
    Counting.callback = staticmethod(callback)
    spark = spark_session()
    best = float("inf")
    for turn in range(2):
        staged = Staged(folder / str(turn))
        work = staged.work(Counting, staged.plan("default", _planned()))
        started = time.perf_counter()
        _check(run_work(ClassicSessions(spark), staged.uri, staged.files, work))
        best = min(best, time.perf_counter() - started)
    return best / BATCHES


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"run_work ended with {code}")


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)
