"""A child process ends with its task, however that ends, and before it if memory runs out."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from airflow_broadway.core.stages.isolating_processor import IsolatingProcessor
from airflow_broadway.core.stages.subprocess_processor import SubprocessProcessor
from airflow_broadway.runs.poison.child_process import ChildProcess
from airflow_broadway.testing import PipelineDriver
from tests.unit.core.stages._killers import Killers, Sleeps
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ties processes so")


def _in_a_processor(note: Path) -> None:
    message = PipelineDriver(Killers).message(str(note))
    IsolatingProcessor(SubprocessProcessor(Sleeps())).handle([message])


def _in_a_fork(note: Path) -> None:
    def work() -> None:
        note.write_text(str(os.getpid()))
        time.sleep(60.0)

    ChildProcess(work).wait()


@pytest.mark.parametrize("begins", [_in_a_processor, _in_a_fork])
def test_child_ends_when_its_task_is_killed(begins, tmp_path):
    note = tmp_path / "child"
    task = os.fork()
    if not task:
        try:
            begins(note)
        finally:
            os._exit(1)
    eventually(lambda: note.exists() and note.read_text() != "")
    child = psutil.Process(int(note.read_text()))
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "1000"

    os.kill(task, signal.SIGKILL)
    os.waitpid(task, 0)

    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
