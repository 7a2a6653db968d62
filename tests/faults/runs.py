"""Runs a pipeline under a real scheduler and kills tasks at seeded random times."""

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
from tests.faults.accounting import check_final_states
from tests.faults.broker import Broker
from tests.faults.brokers import BROKERS
from tests.faults.case_result import CaseResult
from tests.faults.task_killer import KIND_ORDER, Killer

DAGS = ROOT / "tests" / "faults" / "dags"

SETTINGS = {
    # Detects a dead supervisor within seconds instead of five minutes.
    "scheduler.task_instance_heartbeat_timeout": "12",
    "scheduler.task_instance_heartbeat_timeout_detection_interval": "2",
    "workers.min_heartbeat_interval": "2",
    "core.parallelism": "8",
}

#: Number of kills above which each kind of task is killed twice per run.
_DOUBLE_ABOVE = 30


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """A case of whole runs, with its kills.

    :param kills: The number of kills, spread evenly over the kinds of task.
    :param step: The step between the messages' numbers; with 2, no batch needs Spark.
    :param folder: The folder of the queue, the staging area and Airflow's logs.
    """

    broker: str
    messages: int
    kills: int
    seed: int
    folder: Path
    home: Path
    step: int = 1
    log: Callable[[str], None] = print

    @property
    def numbers(self) -> range:
        """The numbers of the messages."""
        return range(0, self.messages * self.step, self.step)

    @property
    def name(self) -> str:
        return f"{self.broker}.{'mixed' if self.kills else 'normal'}"


def run_case(case: RunCase) -> CaseResult:
    """Runs the case in an Airflow that only it uses."""
    with airflow_for(case) as run:
        return run(case)


@contextmanager
def airflow_for(*cases: RunCase) -> Iterator[Callable[[RunCase], CaseResult]]:
    """Starts one Airflow for several cases; yields a function that runs one of them.

    Airflow's home and logs, and the staging folder, are those of the first case.
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

        def run(case: RunCase) -> CaseResult:
            broker = brokers[case.broker]
            broker.send([b"%d" % number for number in case.numbers])
            return _CaseRun(case, broker, airflow, first.folder / "staging").execute()

        yield run


def _environment(case: RunCase, brokers: Iterable[Broker]) -> dict[str, str]:
    settings = {**SETTINGS, "broadway.staging": f"file://{case.folder / 'staging'}"}
    env = airflow_env(home=case.home, dags=DAGS, port=free_port(8180), settings=settings)
    for broker in brokers:
        env |= broker.variables()
    return env


class _CaseRun:
    """Runs the DAG until the queue is empty."""

    def __init__(self, case: RunCase, broker: Broker, airflow: LocalAirflow, staging: Path) -> None:
        self._case = case
        self._staging = staging
        self._broker = broker
        self._airflow = airflow
        self._rng = random.Random(case.seed)
        self._dag_id = f"killed_{case.broker}"
        self._handled = str(case.folder / "handled.db")
        self._result = CaseResult(case.name, case.messages)
        self._killer = Killer(airflow, self._dag_id, self._rng, self._count_kill)
        self._runs: list[str] = []
        # With many kills, two per kind and run save time.
        self._kills_per_kind = 2 if case.kills > _DOUBLE_ABOVE else 1

    def execute(self) -> CaseResult:
        self._airflow.wait_for_dag(self._dag_id, timeout=120)
        self._killer.fail_leftover_runs()
        plan = list(self._plan())
        while plan and self._broker.waiting():
            plan = self._run(plan)
        if plan:
            self._result.mistakes.append(f"the queue was empty before these kills: {plan}")
        idle_runs = 0
        while self._broker.waiting() or self._broker.leased():
            idle_runs += 1
            if idle_runs > 12:
                self._result.mistakes.append(f"{self._broker.waiting()} messages do not drain")
                break
            time.sleep(1.0)  # the delay of a retry
            self._run([])
        [staging] = self._staging.glob(f"*/{self._dag_id}")  # below a folder per pipeline
        numbers = self._case.numbers
        check_final_states(
            self._result, self._broker, numbers, self._handled, staging, len(self._runs)
        )
        if not self._case.kills and self._result.duplicates:
            self._result.mistakes.append("messages were handled twice without a kill")
        return self._result

    def _plan(self) -> Iterator[str]:
        """Yields the kinds of task to kill, in the order in which a run starts them."""
        pending, cycle = self._case.kills, list(KIND_ORDER) * self._kills_per_kind
        while pending > 0:
            # The last, shorter cycle gets random kinds.
            chosen = self._rng.sample(cycle, min(pending, len(cycle)))
            yield from sorted(chosen, key=KIND_ORDER.index)
            pending -= len(chosen)

    # -- one run -------------------------------------------------------------------------------

    def _run(self, plan: Sequence[str]) -> list[str]:
        """Runs once with the planned kills; returns the kills that did not happen."""
        # Each remaining cycle gets a share of the messages, less some reserve, because a cycle may
        # take more than one run.  The last cycle gets all: its retries serve a second run.
        cycle = len(KIND_ORDER) * self._kills_per_kind
        cycles = 1 + (len(plan) > cycle) + len(plan) // (cycle + 1)
        conf: dict[str, Any] = {"handled": self._handled}
        if cycles > 1:
            conf["max_messages"] = max(20, self._broker.waiting() // (2 * cycles))
        run_id = self._airflow.trigger(self._dag_id, conf)
        self._runs.append(run_id)
        pending, missed = list(plan), []
        while pending:
            name = pending[0]
            killed = self._killer.kill_one(run_id, name)
            if killed is None:
                break
            pending.pop(0)
            if not killed:
                missed.append(name)
            if pending and KIND_ORDER.index(pending[0]) < KIND_ORDER.index(name):
                break  # the next cycle needs a new run
        state, problems = self._killer.wait_for_end(run_id)
        self._result.mistakes += problems
        self._case.log(f"  run {len(self._runs)}: {state}, {self._broker.waiting()} messages left")
        return sorted(missed, key=KIND_ORDER.index) + pending

    def _count_kill(self, name: str, target: str) -> None:
        self._result.killed[name] += 1
        self._case.log(f"  kill {self._result.killed.total()} of {self._case.kills}: {target}")
