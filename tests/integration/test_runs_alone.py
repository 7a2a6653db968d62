"""A whole pipeline through ``runs/`` only, in processes that have neither Airflow nor pyspark.

Each task is a process of its own; some are killed while they work.  Each message is counted
independently of the report: in the queue's file, and in the file that ``handle_batch`` writes.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from tests.integration.runs_alone import QUEUE
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
#: The program of a task's process.
PROGRAM = """
from tests.integration.barring import bar
bar("airflow", "pyspark")
from tests.integration.runs_alone import main
main()
"""
COUNT = 200
#: The numbers that the pipeline fails, in the processor or in the batch.
FAILS = {number for number in range(COUNT) if number % 7 == 0 or number % 5 == 0}


class Handled(NamedTuple):
    """One message of one call of ``handle_batch``."""

    message_id: str
    number: int
    redelivered: bool
    batch_id: str


class Workspace:
    """A queue with messages, a staging root, and a sink, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with closing(sqlite3.connect(folder / "sink.db")) as db, db:
            db.execute("CREATE TABLE handled (id, number, redelivered, batch)")
        self.queue = SqliteQueue(folder / "queue.db", QUEUE)
        self.ids = self.queue.send([b"%d" % number for number in range(COUNT)])

    def start(self, task: str, run: str, try_number: int = 1) -> subprocess.Popen[str]:
        """Starts a task of a run."""
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.folder), task, run, str(try_number)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, task: str, run: str, try_number: int = 1) -> Any:
        """Runs a task to its end; returns its result."""
        process = self.start(task, run, try_number)
        out, err = process.communicate(timeout=120.0)
        assert process.returncode == 0, err[-3000:]
        return json.loads(out)

    def kill(self, task: str, run: str, *, at: int) -> None:
        """Kills a task while its callback handles a number."""
        (self.folder / f"stop-at-{task}").write_text(str(at))
        process = self.start(task, run)
        try:
            eventually((self.folder / f"at-{task}").exists)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=60.0)
        assert process.returncode == -signal.SIGKILL
        (self.folder / f"stop-at-{task}").unlink()

    def handled(self) -> list[Handled]:
        """Returns the messages that ``handle_batch`` received, in order."""
        with closing(sqlite3.connect(self.folder / "sink.db")) as db:
            rows = db.execute("SELECT * FROM handled ORDER BY rowid")
            return [Handled(*row) for row in rows]

    def check_account(self, report: Any) -> None:
        """Checks that each sent message is handled once, marked as redelivered, or dead."""
        assert report["balanced"]
        assert not report["totals"]["lapsed"]
        dead = {int(dead_letter.body) for dead_letter in self.queue.dead_letters(limit=None)}
        handled = self.handled()
        assert dead == FAILS
        assert {call.number for call in handled} | dead == set(range(COUNT))
        assert self.queue.depth()[:4] == (0, 0, 0, len(FAILS))
        batches: dict[str, set[str]] = {}
        for call in handled:
            before = batches.setdefault(call.message_id, set())
            assert not before or call.redelivered or call.batch_id in before, call
            before.add(call.batch_id)


@pytest.fixture
def workspace(tmp_path):
    result = Workspace(tmp_path)
    yield result
    result.queue.close()


def test_a_pipeline_runs_without_airflow_and_spark(workspace):
    reference = workspace.run("process", "one")
    assert reference["received"] == COUNT
    counts = workspace.run("batch", "one")
    report = workspace.run("ack", "one")

    assert counts["without_outcome"] == 0
    assert report["totals"]["acked"] == COUNT - len(FAILS)
    assert Counter(call.message_id for call in workspace.handled()).most_common(1)[0][1] == 1
    workspace.check_account(report)

    # and another process reports it
    seen = workspace.run("look", workspace.ids[1])
    assert [(run["run_id"], run["state"]) for run in seen["runs"]] == [("one", "settled")]
    assert [place["outcome"] for place in seen["places"]] == ["succeeded"]


def test_killed_tasks_are_retried_and_settled_by_another_process(workspace):
    # Given a process task and a batch task, each killed while a callback was at work
    workspace.kill("process", "one", at=57)
    assert workspace.queue.depth().leased, "the killed task held nothing"
    retried = workspace.run("process", "one", 2)
    workspace.kill("batch", "one", at=101)

    # When they are retried, and another process settles
    counts = workspace.run("batch", "one", 2)
    report = workspace.run("ack", "one")

    # Then the first try's messages were redelivered, and only batches without outcome ran again
    assert retried["received"] == COUNT
    assert counts["without_outcome"] == 0
    handled = Counter(event.number for event in workspace.handled())
    repeated = [number for number, times in handled.items() if times > 1]
    assert 101 in repeated
    assert len(repeated) <= 10, "batches with an outcome ran again"
    workspace.check_account(report)


def test_a_killed_run_is_settled_by_the_next_runs_process_task(workspace):
    # Given an abandoned run: some of its batches have an outcome, and some have none
    workspace.run("process", "one")
    workspace.kill("batch", "one", at=101)
    before = len(workspace.handled())

    # When the next run begins
    reference = workspace.run("process", "two")
    workspace.run("batch", "two")
    report = workspace.run("ack", "two")

    # Then it settled the batches with an outcome, and received the other messages again
    assert 0 < reference["received"] < COUNT
    assert all(call.redelivered for call in workspace.handled()[before:])
    workspace.check_account(report)
