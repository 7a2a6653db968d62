"""Kills a process before every file system call of staging: no file is torn or half published.

A child process stages a run and kills itself before the n-th call that changes the file system.
The parent then checks the files.
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

#: Loads all modules, then forks a child per input line: the fatal step and a folder.
FORK_SERVER = """
import os, signal, sys
from tests.faults.test_staging_kill import *
from tests.unit.staging.kit import *
import pyarrow

pyarrow.array([1])  # imports pandas once for all children

def kill_before(fatal):
    steps = [0]

    def count_steps(function):
        def call(*args, **kwargs):
            steps[0] += 1
            if steps[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call

    for name in ("fsync", "link", "replace", "rename", "mkdir", "remove", "unlink"):
        setattr(os, name, count_steps(getattr(os, name)))
    return steps

def work(root):
    run = open_run(root)
    lease = lease_of(GENERATION)
    run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)
    rows = RowConverter(PIPELINE)
    with ProcessWriter(run, GENERATION, PIPELINE) as writer:
        writer.messages([rows(message(n, batcher="b")) for n in range(MESSAGES)])
    written = writer.close()
    counts = {"batchers": written.batchers, "files": written.files}
    run.publish(manifest_of(run, GENERATION, MESSAGES, **counts))
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
        code, steps = 1, kill_before(int(fatal))
        try:
            work(root)
            with open(root + ".steps", "w") as file:
                file.write(str(steps[0]))
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class ForkServer:
    """Stages runs in forked processes that kill themselves at a given step."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORK_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def work(self, root: Path, fatal: int) -> int:
        """Stages below ``root``; returns the exit code.

        :param fatal: The step before which the process kills itself; 0: none.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{fatal} {root}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the parent of the forked processes."""
        self._process.communicate(timeout=60)


@pytest.fixture
def fork_server():
    result = ForkServer()
    yield result
    result.close()


def check_no_file_is_torn(root: Path) -> None:
    """Checks that every published file can be read."""
    for path in root.rglob("*.json"):
        if not path.name.startswith(TEMPORARY):
            assert isinstance(json.loads(path.read_text()), dict), path
    for path in root.rglob("manifest.json"):
        Manifest.loads(path.read_text(), str(path))
    for path in root.rglob("outcomes/b/*/*.json"):
        Outcome.loads(path.read_text(), str(path))


def check_plans_are_whole(run: StagedRun, root: Path) -> None:
    """Checks that every published plan is complete, and its messages can be read."""
    for path in root.rglob("plan.jsonl"):
        plan, batches = BatchPlan.read(run.files, str(path.parent.relative_to(run.files.full(""))))
        with BatchReader(run, plan) as reader:
            result = [message.message_id for batch in batches for message in reader.read(batch)]
        assert result == [f"m-{n}" for n in range(MESSAGES)]


def finish(run: StagedRun) -> dict[str, str]:
    """Runs later tasks and sweeps; returns each message's verdict."""
    custodian = FakeCustodian({GENERATION: [f"m-{n}" for n in range(MESSAGES)]})
    for staged, record in list(iter_unsettled(run.store, "Pipeline", "dag")):
        if record.published:  # its batcher is retried
            plan = plan_batches(staged, PIPELINE, "b", [GENERATION], try_label="2")
            for batch, outcome in list(Recorded(staged).outcomes(plan)):
                if outcome is None:
                    record_outcome(staged, plan, batch)
        plans = Recorded(staged).deciding(PIPELINE.batchers, GENERATION)
        settlement, _, progress = build_settlement(staged, GENERATION, PIPELINE, plans, final=True)
        settle_generation(staged, record, custodian, settlement, progress=progress)
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []
    return custodian.verdicts


def test_a_process_killed_at_any_step_is_completed_by_the_next(tmp_path, fork_server):
    # Given the number of steps of a run that is not killed
    assert fork_server.work(tmp_path / "whole", 0) == 0
    steps = int((tmp_path / "whole.steps").read_text())
    assert steps > 30

    for fatal in range(1, steps + 1):
        # When a process dies at one of them
        root = tmp_path / f"step-{fatal}"
        assert fork_server.work(root, fatal) == -signal.SIGKILL

        # Then no file is torn
        check_no_file_is_torn(root)
        run = open_run(root)
        check_plans_are_whole(run, root)
        # and the next task acknowledges or releases all messages, unless the run was settled
        published = run.manifest(GENERATION) is not None
        verdicts = finish(run)
        if verdicts:
            expected = Action.ACK if published else Action.RELEASE
            assert set(verdicts.values()) == {expected.value}
            assert len(verdicts) == MESSAGES
        elif run.files.list("generations"):
            assert run.state(GENERATION) == "settled"


def test_the_first_record_stands(tmp_path, fork_server):
    # Given a settled run, and a zombie that repeats its steps
    assert fork_server.work(tmp_path, 0) == 0
    run = open_run(tmp_path)
    [standing] = Recorded(run).deciding(PIPELINE.batchers, GENERATION)
    for batch in batches_of(run, standing):
        with pytest.raises(AssertionError):
            record_outcome(run, standing, batch)
    settlement, complete, _ = build_settlement(run, GENERATION, PIPELINE, [standing], final=True)
    assert complete

    # Then the zombie gets the first report
    custodian = FakeCustodian({GENERATION: []})
    report = settle_generation(run, run.generation(GENERATION), custodian, settlement)
    assert report == SettleReport(acked=MESSAGES)
