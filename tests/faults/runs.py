"""Runs of one pipeline under a real scheduler, with tasks killed at seeded random times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.faults.accounts import account
from tests.faults.broker import Broker
from tests.faults.brokers import BROKERS
from tests.faults.found import Found
from tests.faults.killing import ORDER, Killer

DAGS = ROOT / "tests" / "faults" / "dags"

SETTINGS = {
    # A task whose supervisor is dead is missed within seconds, not after five minutes.
    "scheduler.task_instance_heartbeat_timeout": "12",
    "scheduler.task_instance_heartbeat_timeout_detection_interval": "2",
    "workers.min_heartbeat_interval": "2",
    "core.parallelism": "8",
}

#: Kills beyond which each kind of task is killed twice in a run.
_MANY = 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of whole runs, with its kills.

    :param kills: How many; spread over the kinds of task in turn, so four are one of each.
    :param step: Between the messages' numbers: with 2, Spark has nothing to do.
    :param folder: Where everything of it lies: queue, staging, Airflow's logs.
    """

    broker: str
    messages: int
    kills: int
    seed: int
    folder: Path
    home: Path
    step: int = 1
    tell: Callable[[str], None] = print

    @property
    def numbers(self) -> range:
        """The messages."""
        return range(0, self.messages * self.step, self.step)

    @property
    def name(self) -> str:
        return f"{self.broker}.{'mixed' if self.kills else 'normal'}"


def run_case(case: Case) -> Found:
    """Runs it in an Airflow of its own."""
    with airflow_for(case) as run:
        return run(case)


@contextmanager
def airflow_for(*cases: Case) -> Iterator[Callable[[Case], Found]]:
    """One Airflow for a case of each broker; yields what runs one of them.

    Its home, its logs and the staging folder are those of the first.
    """
    first = cases[0]
    with ExitStack() as stack:
        brokers: dict[str, Broker] = {}
        for case in cases:
            case.folder.mkdir(parents=True, exist_ok=True)
            broker = brokers[case.broker] = BROKERS[case.broker](case.folder)
            stack.callback(broker.close)
        env = _environment(first, brokers.values())
        airflow = stack.enter_context(LocalAirflow(env, first.folder / "airflow"))

        def run(case: Case) -> Found:
            broker = brokers[case.broker]
            broker.send([b"%d" % number for number in case.numbers])
            return _Runs(case, broker, airflow, first.folder / "staging").execute()

        yield run


def _environment(case: Case, brokers: Iterable[Broker]) -> dict[str, str]:
    settings = {**SETTINGS, "broadway.staging": f"file://{case.folder / 'staging'}"}
    env = airflow_env(home=case.home, dags=DAGS, port=free_port(8180), settings=settings)
    for broker in brokers:
        env |= broker.variables()
    return env


class _Runs:
    """Runs of the DAG, one after another, until the queue is empty."""

    def __init__(self, case: Case, broker: Broker, airflow: LocalAirflow, staging: Path) -> None:
        self._case = case
        self._staging = staging
        self._broker = broker
        self._airflow = airflow
        self._chance = random.Random(case.seed)
        self._dag_id = f"killed_{case.broker}"
        self._handled = str(case.folder / "handled.db")
        self._found = Found(case.name, case.messages)
        self._killer = Killer(airflow, self._dag_id, self._chance, self._struck)
        self._runs: list[str] = []
        # Many kills take long: then two of each kind to a run.
        self._times = 2 if case.kills > _MANY else 1

    def execute(self) -> Found:
        self._airflow.wait_for_dag(self._dag_id, timeout=120)
        self._killer.end_leftovers()
        plan = list(self._plan())
        while plan and self._broker.waiting():
            plan = self._run(plan)
        if plan:
            self._found.mistakes.append(f"the queue was empty before these were killed: {plan}")
        quiet = 0
        while self._broker.waiting() or self._broker.leased():
            quiet += 1
            if quiet > 12:
                self._found.mistakes.append(f"{self._broker.waiting()} messages do not drain")
                break
            time.sleep(1.0)  # a retry's delay
            self._run([])
        [staging] = self._staging.glob(f"*/{self._dag_id}")  # a folder for each pipeline
        numbers = self._case.numbers
        account(self._found, self._broker, numbers, self._handled, staging, len(self._runs))
        if not self._case.kills and self._found.duplicates:
            self._found.mistakes.append("messages were handled twice although nobody was killed")
        return self._found

    def _plan(self) -> Iterator[str]:
        """The kinds to kill, in turn, so that one run can see each of them die so often."""
        left, turn = self._case.kills, list(ORDER) * self._times
        while left > 0:
            # Of the last few too, whichever kinds.
            chosen = self._chance.sample(turn, min(left, len(turn)))
            yield from sorted(chosen, key=ORDER.index)
            left -= len(chosen)

    # -- one run -------------------------------------------------------------------------------

    def _run(self, plan: Sequence[str]) -> list[str]:
        """One run, killed as planned; returns what of the plan is left."""
        # The turns that are left share the rest of the messages, and leave some, for a turn may
        # take more than one run.  The last turn takes all: retries are left, should it take two.
        turn = len(ORDER) * self._times
        turns = 1 + (len(plan) > turn) + len(plan) // (turn + 1)
        conf: dict[str, Any] = {"handled": self._handled}
        if turns > 1:
            conf["max_messages"] = max(20, self._broker.waiting() // (2 * turns))
        run_id = self._airflow.trigger(self._dag_id, conf)
        self._runs.append(run_id)
        left, missed = list(plan), []
        while left:
            name = left[0]
            came = self._killer.kill_one(run_id, name)
            if came is None:
                break
            left.pop(0)
            if not came:
                missed.append(name)
            if left and ORDER.index(left[0]) < ORDER.index(name):
                break  # this run's turn is over
        state, trouble = self._killer.end_of(run_id)
        self._found.mistakes += trouble
        self._case.tell(f"  run {len(self._runs)}: {state}, {self._broker.waiting()} messages left")
        return sorted(missed, key=ORDER.index) + left

    def _struck(self, name: str, target: str) -> None:
        self._found.killed[name] += 1
        self._case.tell(f"  kill {self._found.killed.total()} of {self._case.kills}: {target}")
