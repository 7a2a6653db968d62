"""The kernel's OOM killer kills a message's child process, or a task without a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.cgroups import MemoryGroup, memory_group, prefer_to_kill
from tests.unit.runs.deadly import NUMBER, PLACE, WAY
from tests.unit.runs.deadly_runs import Runs, dead_reasons, ending_of, forked
from tests.unit.runs.steps import Run

pytestmark = pytest.mark.faults

#: Memory limit of a task's processes, in bytes.
LIMIT = 400_000_000
_HOG = "x = []\nwhile True: x.append(b'x' * 10_000_000)"


def _call_in_new_interpreter(function: Callable[..., Any], *arguments: object) -> Any:
    """Calls a function in a new interpreter: a fork's inherited memory would count as well."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _run_twice(folder: Path, group: MemoryGroup) -> tuple[Any, ...]:
    runs = Runs(folder, numbers=range(1000))
    endings = [runs.one(before=lambda: group.add(os.getpid())) for _ in range(2)]
    return endings, runs.last.depth(), dead_reasons(runs.last)


def _run_next_to_memory_hogs(folder: Path, group: MemoryGroup) -> tuple[Any, ...]:
    runs = Runs(folder, numbers=range(1000))
    endings = []
    for _ in range(10):
        run = runs.next()

        def work(run: Run = run) -> None:
            group.add(os.getpid())
            prefer_to_kill()
            # Another process exhausts the memory while the task holds its messages.
            hog = subprocess.Popen([sys.executable, "-c", _HOG])
            Path(f"/proc/{hog.pid}/oom_score_adj").write_text("0")
            run.process()
            hog.wait()

        endings.append(ending_of(forked(work)))
    return endings, runs.one(), runs.last.depth()


def test_a_message_that_exhausts_memory_is_dead_lettered_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(NUMBER, "417")
    monkeypatch.setenv(PLACE, "handle_message")
    monkeypatch.setenv(WAY, "hog")
    with memory_group(LIMIT) as group:
        endings, depth, reasons = _call_in_new_interpreter(_run_twice, tmp_path, group)

    assert endings == [-9, 0]
    assert depth == (0, 0, 0, 1)
    assert reasons == {
        417: "crashed: it ended 2 processes that handled nothing else, the last with SIGKILL"
    }


def test_an_oom_kill_caused_by_another_process_dead_letters_nothing(tmp_path):
    with memory_group(LIMIT) as group:
        endings, last, depth = _call_in_new_interpreter(_run_next_to_memory_hogs, tmp_path, group)

    assert endings == [-9] * 10
    assert last == 0
    assert depth == (0, 0, 0, 0)
