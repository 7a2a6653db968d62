"""Kills ``airflow-broadway dead-letters requeue`` at random times and repeats it.

The requeued messages are dead-lettered again until all kills are done.  Then all are requeued,
handled and counted.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.airflow_env import ROOT
from tests.faults.broker import Broker
from tests.faults.brokers import BROKERS
from tests.faults.case_result import CaseResult
from tests.faults.dags.killed_pipeline import read_inputs
from tests.faults.dead_letter_worker import HANDLED, READY

#: Maximum seconds until the first kill.
_SPAN = 2.0
#: Seconds within which dead letters that a killed command had received are visible again.
_DRAIN_TIMEOUT = 90.0


@dataclass(frozen=True, kw_only=True)
class RequeueCase:
    """A case of requeued dead letters, with its kills.

    :param letters: The number of dead letters.
    :param kills: The number of kills of the requeue command that had requeued at least one message.
    """

    broker: str
    letters: int
    kills: int
    seed: int
    folder: Path
    log: Callable[[str], None] = print

    @property
    def name(self) -> str:
        return f"{self.broker}.requeue"


def run_requeue_case(case: RequeueCase) -> CaseResult:
    """Runs the case at a broker that only it uses."""
    case.folder.mkdir(parents=True, exist_ok=True)
    broker = BROKERS[case.broker](case.folder)
    try:
        return _RequeueRun(case, broker).execute()
    finally:
        broker.close()


class _RequeueRun:
    def __init__(self, case: RequeueCase, broker: Broker) -> None:
        self._case = case
        self._broker = broker
        self._rng = random.Random(case.seed)
        self._result = CaseResult(case.name, case.letters)
        #: Messages that the previous commands have requeued.
        self._requeued = 0
        #: Bounds, in seconds, of the delay until a kill; they approach the command's duration.
        self._min_delay, self._max_delay = 0.0, _SPAN
        self._env = {
            **os.environ,
            **broker.variables(),
            "AIRFLOW_HOME": str(case.folder / "airflow"),
        }

    def execute(self) -> CaseResult:
        broker, result = self._broker, self._result
        broker.send([b"%d" % number for number in range(self._case.letters)])
        self._drain("refuse")
        tries = 0
        while result.killed.total() < self._case.kills and tries < 10 * self._case.kills:
            tries += 1
            if not self._kill_requeue():  # all dead letters are requeued
                self._drain("refuse")
        if result.killed.total() < self._case.kills:
            result.mistakes.append(f"the command was killed only {result.killed.total()} times")
        self._requeue_all()
        self._drain("handle")
        self._check_messages()
        return result

    def _start(self, action: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.faults.dead_letter_worker"]
        with (self._case.folder / "worker.log").open("ab") as log:
            return subprocess.Popen(
                [*command, self._case.broker, str(self._case.folder), action],
                cwd=ROOT,
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _drain(self, action: str) -> None:
        with self._start(action) as process:
            code = process.wait()
        if code:
            raise AssertionError(f"the worker ended with {code}: see worker.log")

    def _kill_requeue(self) -> bool:
        """Starts the command and kills it; returns whether dead letters are left."""
        with self._start("requeue") as process:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line.strip() != READY:
                pass
            started = time.monotonic()
            try:
                code = process.wait(self._rng.uniform(self._min_delay, self._max_delay))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            duration = time.monotonic() - started
        requeued = self._broker.waiting()
        moment = (
            "before" if not requeued else "during" if requeued < self._case.letters else "after"
        )
        if moment == "before":
            self._min_delay, self._max_delay = (
                (self._min_delay + duration) / 2,
                max(self._max_delay, 1.5 * duration),
            )
        if moment == "after":
            self._min_delay, self._max_delay = self._min_delay / 2, (self._min_delay + duration) / 2
        moved, self._requeued = requeued > self._requeued, 0 if moment == "after" else requeued
        if code < 0 and moved:
            self._result.killed[moment] += 1
            kills = self._result.killed.total()
            self._case.log(f"  kill {kills} of {self._case.kills}: {requeued} requeued so far")
        return moment != "after"

    def _requeue_all(self) -> None:
        """Requeues until no dead letter is left, including those that a killed command hid."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT
        quiet = 0
        while quiet < 2:
            with self._start("requeue") as process:
                output, _ = process.communicate()
            report = json.loads(output.split(READY, 1)[1])
            if process.returncode or report["refused"]:
                self._result.mistakes.append(f"the requeue was rejected: {report}")
            quiet = 0 if report["requeued"] or not self._no_dead_letters() else quiet + 1
            if time.monotonic() > deadline:
                self._result.mistakes.append("some dead letters were not requeued")
                return

    def _no_dead_letters(self) -> bool:
        """Returns whether no dead letter is left; for Kafka, whose log keeps them, always true."""
        return self._case.broker == "kafka" or not self._broker.dead_letters()

    def _check_messages(self) -> None:
        result, broker = self._result, self._broker
        if broker.waiting() or broker.leased():
            result.mistakes.append(f"{broker.waiting()} messages and {broker.leased()} leases left")
        calls = read_inputs(str(self._case.folder / HANDLED))
        copies = Counter(call.number for call in calls)
        result.lost = [number for number in range(self._case.letters) if not copies[number]]
        result.duplicates = copies.total() - len(copies)
        # A requeued message may be a duplicate, so each must be marked.
        result.unmarked = sum(not call.redelivered for call in calls)
        attempts = {call.attempt for call in calls}
        if attempts != {1}:
            result.mistakes.append(f"requeued messages have the attempts {sorted(attempts)}")
        if self._case.broker == "sqlite" and result.duplicates:
            result.mistakes.append("the embedded queue duplicated a message")
