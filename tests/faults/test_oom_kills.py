"""The kernel's OOM killer: it ends a message's child, or a task that did nothing wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cgroups import memory_group, prefer_to_kill
from tests.unit.runs.deadly import NUMBER, PLACE, WAY
from tests.unit.runs.deadly_runs import Runs, dead_reasons, ending_of, forked

pytestmark = pytest.mark.faults

#: Bytes that the processes of a task may have together.
LIMIT = 400_000_000
_HOG = "x = []\nwhile True: x.append(b'x' * 10_000_000)"


def test_a_message_that_exhausts_memory_is_dead_lettered_and_the_others_are_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER, "417")
    monkeypatch.setenv(PLACE, "handle_message")
    monkeypatch.setenv(WAY, "hog")
    runs = Runs(tmp_path)
    runs.last.send(range(1000))
    with memory_group(LIMIT) as group:
        endings = [runs.one(before=lambda: group.add(os.getpid())) for _ in range(2)]

    assert endings == [-9, 0]
    assert runs.last.depth() == (0, 0, 0, 1)
    assert dead_reasons(runs.last) == {
        417: "crashed: it ended 2 processes that handled nothing else, the last with SIGKILL"
    }


def test_a_task_that_the_oom_killer_ends_for_another_process_dead_letters_nothing(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path)
    runs.last.send(range(1000))
    with memory_group(LIMIT) as group:
        for _ in range(10):
            run = runs.next()

            def work(run: object = run) -> None:
                group.add(os.getpid())
                prefer_to_kill()
                # Its neighbour takes all memory while the messages are in hand.
                hog = subprocess.Popen([sys.executable, "-c", _HOG])
                Path(f"/proc/{hog.pid}/oom_score_adj").write_text("0")
                run.process()  # type: ignore[attr-defined]
                hog.wait()

            assert ending_of(forked(work)) == -9

    assert runs.one() == 0
    assert runs.last.depth() == (0, 0, 0, 0)
