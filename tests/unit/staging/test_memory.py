"""Memory is constant: ten times the messages need no more, except for open batches."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_broadway import Broadway
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.stages.staged_row import RowConverter
from airflow_broadway.staging import plan_data_files, tables
from airflow_broadway.staging import writer as writer_module
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.settlement import build_settlement
from airflow_broadway.staging.writer import ProcessWriter
from tests.unit.staging.kit import (
    batches_of,
    manifest_of,
    message,
    open_generation,
    open_run,
    pipeline_of,
    publish,
    record_outcome,
)

SMALL, LARGE = 20_000, 200_000
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    """Bounds that the smaller run passes several times, too."""
    monkeypatch.setattr(writer_module, "GROUP_ROWS", 4096)
    monkeypatch.setattr(plan_data_files, "BUFFER_ROWS", 8192)
    monkeypatch.setattr(tables, "FILE_BYTES", 512 * 1024)


def peak(work: Callable[[], object]) -> float:
    """The peak of MiB that Python and Arrow allocate during the call."""
    pa.default_memory_pool().release_unused()
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    highest = 0

    def watch() -> None:
        nonlocal highest
        highest = max(highest, pa.total_allocated_bytes() - before)

    data_files_flush = plan_data_files.DataFiles.flush

    def flush(self: plan_data_files.DataFiles) -> tuple[int, list[int]]:
        watch()
        return data_files_flush(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan_data_files.DataFiles, "flush", flush)
        work()
    watch()
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (python + highest) / MIB


def chunks(count: int) -> Iterator[list[Message]]:
    for start in range(0, count, 500):
        yield [
            message(n, {"n": n, "s": f"text {n}"}, batcher="b", batch_key=n % 10, at=n / 1000)
            for n in range(start, start + 500)
        ]


def stage(run: StagedRun, pipeline: Broadway, count: int) -> str:
    generation = open_generation(run).generation
    rows = RowConverter(pipeline)
    with ProcessWriter(run, generation, pipeline) as writer:
        for chunk in chunks(count):
            writer.messages([rows(message) for message in chunk])
    written = writer.close()
    manifest = manifest_of(run, generation, count, batchers=written.batchers, files=written.files)
    assert run.publish(manifest)
    return generation


def peaks_of(root: Path, pipeline: Broadway, count: int) -> dict[str, float]:
    """MiB that staging, planning and settling ``count`` messages take at most."""
    run = open_run(root, f"run:{count}")
    generations: list[str] = []
    plans: list[BatchPlan] = []
    settled: list[int] = []

    def plan() -> None:
        plans.append(plan_batches(run, pipeline, "b", generations, try_label="1"))

    peaks = {"stage": peak(lambda: generations.append(stage(run, pipeline, count)))}
    peaks["plan"] = peak(plan)
    for batch in batches_of(run, plans[0])[:-1]:
        record_outcome(run, plans[0], batch)
    settlement, complete, _ = build_settlement(run, generations[0], pipeline, plans, final=False)
    assert not complete
    peaks["settle"] = peak(lambda: settled.append(sum(1 for _ in settlement.entries())))
    assert settled[0] > count / 2
    return peaks


@pytest.mark.slow
def test_ten_times_the_messages_take_no_more_memory(tmp_path):
    pipeline = pipeline_of(b=Batcher(schema="n int, s string", batch_size=5000))
    stage(open_run(tmp_path, "warm"), pipeline, 1000)
    small, large = (peaks_of(tmp_path, pipeline, count) for count in (SMALL, LARGE))
    for name, before in small.items():
        assert large[name] < before * 1.5 + 2, (name, small, large)


@pytest.mark.slow
def test_open_batch_costs_about_a_kilobyte(tmp_path):
    # Given the same messages with ten keys, and with distinct keys
    pipeline = pipeline_of(b=Batcher(schema="n int", batch_size=5000, batch_timeout=None))

    def planning(keys):
        run = open_run(tmp_path, f"keys:{keys}")
        messages = [
            [
                message(n, {"n": n}, batcher="b", batch_key=n % keys)
                for n in range(start, start + 50)
            ]
            for start in range(0, SMALL, 50)
        ]
        generation = publish(run, pipeline, messages)
        return peak(lambda: plan_batches(run, pipeline, "b", [generation], try_label="1"))

    planning(11)
    few, many = planning(10), planning(SMALL)
    assert 1024 / 4 < (many - few) * MIB / SMALL < 1024 * 1.5
