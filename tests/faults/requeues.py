"""Dead letters that are requeued by a command, which is killed at random times, and repeated.

It is ``airflow-broadway dead-letters requeue``, in a process of its own.  What it sent back dies
once more while kills are left; in the end all is sent back, handled, and counted.
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
from tests.faults.dags.killed_pipeline import noted
from tests.faults.found import Found
from tests.faults.letters_worker import AT_WORK, HANDLED

#: Seconds within which the command is killed at first.
_SPAN = 2.0
#: Seconds until letters that a killed command had looked at are others' again.
_PATIENCE = 90.0


@dataclass(frozen=True, kw_only=True)
class Requeues:
    """A case of requeued dead letters, with its kills.

    :param letters: How many.
    :param kills: Of the command that sends them back; one that moved nothing does not count.
    """

    broker: str
    letters: int
    kills: int
    seed: int
    folder: Path
    tell: Callable[[str], None] = print

    @property
    def name(self) -> str:
        return f"{self.broker}.requeue"


def run_requeues(case: Requeues) -> Found:
    """Runs the case at a broker of its own."""
    case.folder.mkdir(parents=True, exist_ok=True)
    broker = BROKERS[case.broker](case.folder)
    try:
        return _Requeues(case, broker).execute()
    finally:
        broker.close()


class _Requeues:
    def __init__(self, case: Requeues, broker: Broker) -> None:
        self._case = case
        self._broker = broker
        self._chance = random.Random(case.seed)
        self._found = Found(case.name, case.letters)
        #: How many were sent back by those before.
        self._back = 0
        #: Seconds between which the command is killed: they close in on what it takes.
        self._early, self._late = 0.0, _SPAN
        self._env = {
            **os.environ,
            **broker.variables(),
            "AIRFLOW_HOME": str(case.folder / "airflow"),
        }

    def execute(self) -> Found:
        broker, found = self._broker, self._found
        broker.send([b"%d" % number for number in range(self._case.letters)])
        self._take("refuse")
        tries = 0
        while found.killed.total() < self._case.kills and tries < 10 * self._case.kills:
            tries += 1
            if not self._killed():  # there is nothing left to send back
                self._take("refuse")
        if found.killed.total() < self._case.kills:
            found.mistakes.append(f"the command was killed {found.killed.total()} times only")
        self._send_all_back()
        self._take("handle")
        self._account()
        return found

    def _start(self, what: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "tests.faults.letters_worker"]
        with (self._case.folder / "worker.log").open("ab") as log:
            return subprocess.Popen(
                [*line, self._case.broker, str(self._case.folder), what],
                cwd=ROOT,
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _take(self, what: str) -> None:
        with self._start(what) as process:
            code = process.wait()
        if code:
            raise AssertionError(f"the worker ended with {code}: see worker.log")

    def _killed(self) -> bool:
        """Begins to send back, and kills it; whether anything is left to send back."""
        with self._start("requeue") as process:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line.strip() != AT_WORK:
                pass
            began = time.monotonic()
            try:
                code = process.wait(self._chance.uniform(self._early, self._late))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            lasted = time.monotonic() - began
        back = self._broker.waiting()
        when = "before" if not back else "amid" if back < self._case.letters else "after"
        if when == "before":
            self._early, self._late = (self._early + lasted) / 2, max(self._late, 1.5 * lasted)
        if when == "after":
            self._early, self._late = self._early / 2, (self._early + lasted) / 2
        moved, self._back = back > self._back, 0 if when == "after" else back
        if code < 0 and moved:
            self._found.killed[when] += 1
            kills = self._found.killed.total()
            self._case.tell(f"  kill {kills} of {self._case.kills}: {back} were sent back by then")
        return when != "after"

    def _send_all_back(self) -> None:
        """Until no letter is left to requeue, nor hidden by a killed command."""
        deadline = time.monotonic() + _PATIENCE
        quiet = 0
        while quiet < 2:
            with self._start("requeue") as process:
                answer, _ = process.communicate()
            report = json.loads(answer.split(AT_WORK, 1)[1])
            if process.returncode or report["refused"]:
                self._found.mistakes.append(f"what was sent back was refused: {report}")
            quiet = 0 if report["requeued"] or not self._none_left() else quiet + 1
            if time.monotonic() > deadline:
                self._found.mistakes.append("dead letters are left, and are not sent back")
                return

    def _none_left(self) -> bool:
        """Whether the broker has none.  Of Kafka, whose log has them for ever, only we know."""
        return self._case.broker == "kafka" or not self._broker.dead()

    def _account(self) -> None:
        found, broker = self._found, self._broker
        if broker.waiting() or broker.leased():
            found.mistakes.append(f"{broker.waiting()} messages and {broker.leased()} leases left")
        calls = noted(str(self._case.folder / HANDLED))
        copies = Counter(call.number for call in calls)
        found.lost = [number for number in range(self._case.letters) if not copies[number]]
        found.duplicates = copies.total() - len(copies)
        # Each was sent back, and so may be a second one: none comes as if it were the first.
        found.unmarked = sum(not call.redelivered for call in calls)
        tried = {call.attempt for call in calls}
        if tried != {1}:
            found.mistakes.append(f"what was sent back came on the attempts {sorted(tried)}")
        if self._case.broker == "sqlite" and found.duplicates:
            found.mistakes.append("the embedded queue had a message in two places")
