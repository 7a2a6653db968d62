"""The kernel's OOM killer: it ends a message's child, or a task that did nothing wrong."""

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

#: Bytes that the processes of a task may have together.
LIMIT = 400_000_000
_HOG = "x = []\nwhile True: x.append(b'x' * 10_000_000)"


def _in_a_small_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a new interpreter: the OOM killer counts what a fork has inherited too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _two_runs(folder: Path, group: MemoryGroup) -> tuple[Any, ...]:
    runs = Runs(folder, numbers=range(1000))
    endings = [runs.one(before=lambda: group.add(os.getpid())) for _ in range(2)]
    return endings, runs.last.depth(), dead_reasons(runs.last)


def _ten_runs_beside_a_hog_and_one_more(folder: Path, group: MemoryGroup) -> tuple[Any, ...]:
    runs = Runs(folder, numbers=range(1000))
    endings = []
    for _ in range(10):
        run = runs.next()

        def work(run: Run = run) -> None:
            group.add(os.getpid())
            prefer_to_kill()
            # Its neighbour takes all memory while the messages are in hand.
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
        endings, depth, reasons = _in_a_small_process(_two_runs, tmp_path, group)

    assert endings == [-9, 0]
    assert depth == (0, 0, 0, 1)
    assert reasons == {
        417: "crashed: it ended 2 processes that handled nothing else, the last with SIGKILL"
    }


def test_an_oom_kill_caused_by_another_process_dead_letters_nothing(tmp_path):
    with memory_group(LIMIT) as group:
        endings, last, depth = _in_a_small_process(
            _ten_runs_beside_a_hog_and_one_more, tmp_path, group
        )

    assert endings == [-9] * 10
    assert last == 0
    assert depth == (0, 0, 0, 0)
