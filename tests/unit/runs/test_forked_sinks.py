"""A Python batcher's batches in a child process, with a sink whose client survives no fork.

Each test runs in a new process: in pytest's own, deltalake has been used.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from airflow_broadway.runs.poison.child_process import ChildProcess
from airflow_broadway.sinks import DeltaTable
from tests.unit.runs.steps import Point, Run, dies
from tests.unit.runs.test_sinks import COMMIT, GOOD, RECORD, Folder, batch


class Delta(Folder):
    batchers = {"default": replace(Folder.batchers["default"], sink=DeltaTable(path="/replaced"))}


def in_new_process(work: Callable[..., Any], *args: Any) -> Any:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(work, *args).result(timeout=90)


def make(folder: Path, run_id: str = "manual__1", **options: Any) -> Run:
    sink = {"sink": {"path": str(folder / "table")}}
    return Run(folder, run_id, pipeline=Delta, batchers={"default": sink}, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    schema = pa.schema([("number", pa.int64())])
    deltalake.DeltaTable.create(tmp_path / "table", schema=schema)
    return tmp_path


def numbers(folder: Path) -> list[Any]:
    table = deltalake.DeltaTable(folder / "table").to_pyarrow_table()
    found: list[Any] = table["number"].to_pylist()
    return sorted(found)


def in_fork(folder: Path, step: Callable[[], Any]) -> Any:
    """Runs a task in a process of its own, as a host does; returns its result."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    assert ChildProcess(lambda: result.write_text(json.dumps(step()))).wait() == ""
    return json.loads(result.read_text())


def retry_after_death(folder: Path, point: Sequence[Any]) -> Any:
    """Dies at a point, and tries again."""
    run = make(folder)
    run.send(range(1, 26))
    pulled = in_fork(folder, run.process)
    dies(lambda: batch(run, pulled), Point(*point))
    in_fork(folder, lambda: batch(run, pulled, try_number=2))
    in_fork(folder, run.ack)
    return run.dead(), run.depth()


@pytest.mark.parametrize(
    "point",
    [(COMMIT, "before", 2), (COMMIT, "after", 2), (RECORD, "after", 2)],
    ids=["before", "landed", "recorded"],
)
def test_retry_after_a_death_commits_in_a_child_process(folder: Path, point: Sequence[Any]) -> None:
    dead, depth = in_new_process(retry_after_death, folder, point)

    assert numbers(folder) == GOOD
    assert dead == [5, 7, 10, 14, 15, 20, 21, 25]
    assert depth == (0, 0, 0, 8)


def clear_after_death(folder: Path) -> Any:
    """Dies in a run of two process tasks, of which one is cleared."""
    run = make(folder)
    run.send(range(1, 26))
    first = in_fork(folder, lambda: run.process(0, max_messages=13))
    second = in_fork(folder, lambda: run.process(1))
    dies(lambda: batch(run, first, second), Point(COMMIT, "after", 1))
    cleared = in_fork(folder, lambda: run.process(0, try_number=2))
    in_fork(folder, lambda: batch(run, cleared, second, try_number=2))
    in_fork(folder, run.ack)
    later = make(folder, "manual__2", finished=[run.run_id], create=False)
    received = in_fork(folder, later.process)
    in_fork(folder, lambda: batch(later, received))
    in_fork(folder, later.ack)
    return run.depth()


def test_clear_after_a_death_commits_in_a_child_process(folder: Path) -> None:
    depth = in_new_process(clear_after_death, folder)

    assert numbers(folder) == GOOD
    assert depth == (0, 0, 0, 8)
