"""The harness itself: cases leave no processes behind, and skipped points are reported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.airflow_env import ROOT

pytestmark = pytest.mark.faults

#: The head of every program.
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
#: The subject raises while a process is suspended.
RAISES = """
class Raises(Embedded):
    def pass_time(self, seconds):
        raise OSError("the broker is gone")

case = Case.parse("one/process/1 return #1: suspended before [lapse]")
try:
    campaign(Batches, Raises).run(case)
except OSError as error:
    print(error)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child is left")
"""
#: A recovery is suspended.
SUSPENDED = """
for recovery in ("one/process/2", "drain-1/process/1"):
    faults = f"one/process/1 return #1: killed before, then {recovery} return #1: suspended before"
    result = campaign(Batches).run(Case.parse(faults))
    assert result.passed, result.account.lines
    executions = [one for one in result.executions if one.name.startswith(recovery[:-2])]
    print([execution.end_state.value for execution in executions])
"""
#: Two recoveries run concurrently, and one of them is suspended.
CONCURRENT = """
faults = "one/process/1 return #1: killed before, then two/poke/1 return #1: suspended before"
result = campaign(NoBatchers).run(Case.parse(faults + " [side by side]"))
assert result.passed, result.account.lines
names = [one.name for one in result.executions if one.end_state.value == "done"]
print(*(name for name in names if name.startswith("t")))
"""
#: A pipeline that creates another file in each run.
ODD = """
class Odd(NoBatchers):
    def handle_message(self, processor, message, context):
        open(f"by-{os.getpid()}", "a").close()
        return message

totals = campaign(Odd).run_cases([])
print(sorted({point.call.kind for point in totals.unsteady}), len(totals.points))
"""


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (RAISES, "the broker is gone\nno child is left\n"),
        (SUSPENDED, "['died', 'done', 'done']\n['done', 'done']\n"),
        (
            CONCURRENT,
            "two/process/1 three/process/1 two/poke/1 three/poke/1 three/ack/1 two/ack/1\n",
        ),
        (ODD, "['create'] 0\n"),
    ],
    ids=["a subject raises", "a recovery is suspended", "two recoveries", "an unsteady pipeline"],
)
def test_no_process_is_left_behind_and_no_gap_is_hidden(tmp_path, program, result):
    # In a separate process: it forks, and a test session has threads.
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == result, done.stderr[-3000:]
