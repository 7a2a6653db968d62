"""The harness itself: cases leave no processes behind, and points not struck are reported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.airflow_env import ROOT

pytestmark = pytest.mark.faults

#: The beginning of each program.
HEAD = """
import os, sys
from functools import partial
from pathlib import Path
from airflow_broadway.testing.crashes.campaign import Campaign
from airflow_broadway.testing.crashes.case import Case
from airflow_broadway.testing.crashes.subject import Embedded
from tests.crashes.campaigns import MESSAGES
from tests.crashes.pipelines import Batches, NoBatchers

def campaign(pipeline, subject=Embedded):
    return Campaign(partial(subject, pipeline), MESSAGES, Path(sys.argv[1]))
"""
#: The subject raises while a process sleeps.
RAISES = """
class Raises(Embedded):
    def pass_time(self, seconds):
        raise OSError("the broker is gone")

case = Case.parse("one/process/1 return #1: asleep before [lapse]")
try:
    campaign(Batches, Raises).run(case)
except OSError as error:
    print(error)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child is left")
"""
#: Who recovers from a death falls asleep.
SLEEPS = """
for sleeper in ("one/process/2", "drain-1/process/1"):
    strikes = f"one/process/1 return #1: killed before, then {sleeper} return #1: asleep before"
    result = campaign(Batches).run(Case.parse(strikes))
    assert result.good, result.account.lines
    task = sleeper[:-2]
    print([each.ended.value for each in result.executions if each.name.startswith(task)])
"""
#: Two runs recover side by side, and one of them falls asleep in the midst.
BESIDE = """
strikes = "one/process/1 return #1: killed before, then two/look/1 return #1: asleep before"
result = campaign(NoBatchers).run(Case.parse(strikes + " [side by side]"))
assert result.good, result.account.lines
names = [each.name for each in result.executions if each.ended.value == "done"]
print(*(name for name in names if name.startswith("t")))
"""
#: A pipeline that makes another file in each run.
ODD = """
class Odd(NoBatchers):
    def handle_message(self, processor, message, context):
        open(f"by-{os.getpid()}", "a").close()
        return message

sums = campaign(Odd).strike([])
print(sorted({each.call.kind for each in sums.unsteady}), len(sums.points))
"""


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (RAISES, "the broker is gone\nno child is left\n"),
        (SLEEPS, "['died', 'done', 'done']\n['done', 'done']\n"),
        (BESIDE, "two/process/1 three/process/1 two/look/1 three/look/1 three/ack/1 two/ack/1\n"),
        (ODD, "['create'] 0\n"),
    ],
    ids=["a subject raises", "a second one sleeps", "two recover at once", "an odd pipeline"],
)
def test_no_process_is_left_behind_and_no_gap_is_hidden(tmp_path, program, result):
    # A program of its own: it forks, and a test session has threads.
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == result, done.stderr[-3000:]
