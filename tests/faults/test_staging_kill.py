"""kill -9 at every step at which staging writes: nothing torn, nothing half published.

A child process does the work, and dies by SIGKILL right before the call that it is told, counting
those by which a file system keeps something.  The parent then looks at what is there.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.formats.files import TEMPORARY
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun, iter_unsettled
from airflow_broadway.staging.settling.settlement import build_settlement, settle_generation
from tests.unit.staging.kit import FakeCustodian, batches_of, open_run, pipeline_of, record_outcome

pytestmark = pytest.mark.faults

MESSAGES = 50
PIPELINE = pipeline_of(b=Batcher(engine="python", batch_size=20, batch_timeout=None))
GENERATION = "f" * 32

#: A process that has all modules loaded, and forks one for each line: a folder, and the fatal step.
NURSERY = """
import os, signal, sys
from tests.faults.test_staging_kill import *
from tests.unit.staging.kit import *
import pyarrow

pyarrow.array([1])  # which imports pandas, once for all children

def watch(fatal):
    counted = [0]

    def watched(function):
        def call(*given, **named):
            counted[0] += 1
            if counted[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)
        return call

    for name in ("fsync", "link", "replace", "rename", "mkdir", "remove", "unlink"):
        setattr(os, name, watched(getattr(os, name)))
    return counted

def work(root):
    run = open_run(root)
    lease = lease_of(GENERATION)
    run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)
    rows = RowConverter(PIPELINE)
    with ProcessWriter(run, GENERATION, PIPELINE) as writer:
        writer.messages([rows(message(n, batcher="b")) for n in range(MESSAGES)])
    written = writer.close()
    made = {"batchers": written.batchers, "files": written.files}
    run.publish(manifest_of(run, GENERATION, MESSAGES, **made))
    plan = plan_batches(run, PIPELINE, "b", [GENERATION], try_label="1")
    for batch in batches_of(run, plan):
        record_outcome(run, plan, batch)
    settlement, _, progress = build_settlement(run, GENERATION, PIPELINE, [plan], final=True)
    custodian = FakeCustodian({GENERATION: [f"m-{n}" for n in range(MESSAGES)]})
    settle_generation(run, run.generation(GENERATION), custodian, settlement, progress=progress)

for line in sys.stdin:
    fatal, root = line.rstrip().split(" ", 1)
    pid = os.fork()
    if pid == 0:
        code, counted = 1, watch(int(fatal))
        try:
            work(root)
            with open(root + ".steps", "w") as file:
                file.write(str(counted[0]))
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Nursery:
    """Does runs' staging in processes of their own, which die at a given step."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def work(self, root: Path, fatal: int) -> int:
        """Stages below ``root``; dies at the ``fatal``-th step, never at 0.  The exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{fatal} {root}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it."""
        self._process.communicate(timeout=60)


@pytest.fixture
def nursery():
    result = Nursery()
    yield result
    result.close()


def check_no_file_is_torn(root: Path) -> None:
    """Every file that has its name is whole: what is published at all can be read."""
    for path in root.rglob("*.json"):
        if not path.name.startswith(TEMPORARY):
            assert isinstance(json.loads(path.read_text()), dict), path
    for path in root.rglob("manifest.json"):
        Manifest.loads(path.read_text(), str(path))
    for path in root.rglob("outcomes/b/*/*.json"):
        Outcome.loads(path.read_text(), str(path))


def check_plans_are_whole(run: StagedRun, root: Path) -> None:
    """A plan that has its name has all its lines, and all its messages can be read."""
    for path in root.rglob("plan.jsonl"):
        plan, batches = BatchPlan.read(run.files, str(path.parent.relative_to(run.files.full(""))))
        with BatchReader(run, plan) as reader:
            result = [message.message_id for batch in batches for message in reader.read(batch)]
        assert result == [f"m-{n}" for n in range(MESSAGES)]


def finish(run: StagedRun) -> dict[str, str]:
    """Runs later tasks and sweeps; returns the verdict on each message."""
    custodian = FakeCustodian({GENERATION: [f"m-{n}" for n in range(MESSAGES)]})
    for found, record in list(iter_unsettled(run.store, "Pipeline", "dag")):
        if record.published:  # its batcher is retried
            plan = plan_batches(found, PIPELINE, "b", [GENERATION], try_label="2")
            for batch, outcome in list(Recorded(found).outcomes(plan)):
                if outcome is None:
                    record_outcome(found, plan, batch)
        plans = Recorded(found).deciding(PIPELINE.batchers, GENERATION)
        settlement, _, progress = build_settlement(found, GENERATION, PIPELINE, plans, final=True)
        settle_generation(found, record, custodian, settlement, progress=progress)
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []
    return custodian.verdicts


def test_a_process_killed_at_any_step_is_completed_by_the_next(tmp_path, nursery):
    # Given the number of steps of a run that is not killed
    assert nursery.work(tmp_path / "whole", 0) == 0
    steps = int((tmp_path / "whole.steps").read_text())
    assert steps > 30

    for fatal in range(1, steps + 1):
        # When a process dies at one of them
        root = tmp_path / f"step-{fatal}"
        assert nursery.work(root, fatal) == -signal.SIGKILL

        # Then nothing is torn
        check_no_file_is_torn(root)
        run = open_run(root)
        check_plans_are_whole(run, root)
        # and the next task completes it: all acked, or all released, or it was done
        published = run.manifest(GENERATION) is not None
        verdicts = finish(run)
        if verdicts:
            expected = Action.ACK if published else Action.RELEASE
            assert set(verdicts.values()) == {expected.value}
            assert len(verdicts) == MESSAGES
        elif run.files.list("generations"):
            assert run.state(GENERATION) == "settled"


def test_the_first_record_stands(tmp_path, nursery):
    # Given a run that is settled, and a zombie that does its steps again
    assert nursery.work(tmp_path, 0) == 0
    run = open_run(tmp_path)
    [standing] = Recorded(run).deciding(PIPELINE.batchers, GENERATION)
    for batch in batches_of(run, standing):
        with pytest.raises(AssertionError):
            record_outcome(run, standing, batch)
    settlement, complete, _ = build_settlement(run, GENERATION, PIPELINE, [standing], final=True)
    assert complete

    # Then its report is the first one
    custodian = FakeCustodian({GENERATION: []})
    report = settle_generation(run, run.generation(GENERATION), custodian, settlement)
    assert report == SettleReport(acked=MESSAGES)
