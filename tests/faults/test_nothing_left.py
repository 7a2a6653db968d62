"""Programs that start servers stop them, however the program ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.faults

#: Starts a child, and a daemon: a process in a new session whose parent has ended.
PROGRAM = """
import subprocess, sys, time
from tests.nothing_left import nothing_left_behind

with nothing_left_behind():
    child = subprocess.Popen(["sleep", "600"])
    started = subprocess.run(
        [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '600'],"
         " stdout=subprocess.DEVNULL, start_new_session=True).pid)"],
        stdout=subprocess.PIPE, text=True,
    )
    try:
        print(child.pid, started.stdout.strip(), flush=True)
        time.sleep(600)
    finally:
        print("in order", flush=True)
"""
#: A parent process of the program, like make.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "the parent's death"])
def test_child_processes_end_with_their_program(end):
    # Given a program with two children
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, PROGRAM],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as started:
        assert started.stdout is not None
        children = [psutil.Process(int(pid)) for pid in started.stdout.readline().split()]
        assert len(children) == 2
        [program] = psutil.Process(started.pid).children()

        # When it is ended
        if end == "the parent's death":
            started.kill()
        else:
            program.send_signal(signal.Signals[end])

        # Then both end with it, and its finally block runs unless it is killed
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        assert started.stdout.read() == ("" if end == "SIGKILL" else "in order\n")
        assert started.wait(20) is not None
