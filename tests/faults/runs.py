"""Runs of one pipeline under a real scheduler, whose tasks are killed at random seeded instants.

What became of the messages is counted from two witnesses that are not ours: the broker's own
tables, and what ``handle_batch`` wrote down of its inputs.  Our reports must then agree with them.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import FINISHED, LocalAirflow, free_port
from tests.faults.brokers import BROKERS, Broker
from tests.faults.dags import killed_pipeline as truth
from tests.faults.killing import KINDS, ORDER, Target, kill, victims, waits

__all__ = ["SETTINGS", "Case", "Found", "run_case"]

DAGS = ROOT / "tests" / "faults" / "dags"

SETTINGS = {
    # A task whose supervisor is dead is missed within seconds, not after five minutes.
    "scheduler.task_instance_heartbeat_timeout": "12",
    "scheduler.task_instance_heartbeat_timeout_detection_interval": "2",
    "workers.min_heartbeat_interval": "2",
    "core.parallelism": "8",
}

#: Seconds after which a run that does not end is an error.
PATIENCE = 400.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is done to whom.

    :param kills: How many; spread over the kinds of task in turn, so four are one of each.
    :param folder: Where everything of it lies: queue, staging, Airflow's logs.
    """

    broker: str
    messages: int
    kills: int
    seed: int
    folder: Path
    home: Path
    tell: Callable[[str], None] = print

    @property
    def name(self) -> str:
        return f"{self.broker}.mixed"


@dataclass
class Found:
    """What became of the messages.

    :param lost: Numbers that were neither handled to success nor are dead letters, as they should.
    :param duplicates: Inputs of ``handle_batch`` beyond the first of one message and attempt, and
        messages that ended twice.
    :param unmarked: Of these, neither marked nor under a batch id they had before.
    :param mistakes: Anything else that must not be, one sentence each.
    """

    case: Case
    killed: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    duplicates: int = 0
    unmarked: int = 0
    mistakes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.case.name,
            "messages": self.case.messages,
            "kills": self.killed.total(),
            "lost": len(self.lost),
            "duplicates": self.duplicates,
            "unmarked": self.unmarked,
        }


def run_case(case: Case) -> Found:
    """Run it in an Airflow of its own."""
    case.folder.mkdir(parents=True, exist_ok=True)
    broker = BROKERS[case.broker](case.folder)
    try:
        broker.send([b"%d" % number for number in range(case.messages)])
        with LocalAirflow(_environment(case, broker), case.folder / "airflow") as airflow:
            return _Runs(case, broker, airflow).execute()
    finally:
        broker.close()


def _environment(case: Case, broker: Broker) -> dict[str, str]:
    settings = {**SETTINGS, "broadway.staging": f"file://{case.folder / 'staging'}"}
    env = airflow_env(home=case.home, dags=DAGS, port=free_port(8180), settings=settings)
    return {**env, **broker.variables()}


def _finished(tasks: Iterable[Mapping[str, Any]]) -> bool:
    """Whether tasks are through; those that were never made do not count."""
    ended = ("success", "failed", "skipped", "upstream_failed")
    return all(task["state"] in ended for task in tasks)


class _Runs:
    """Runs of the DAG, one after another, until the queue is empty."""

    def __init__(self, case: Case, broker: Broker, airflow: LocalAirflow) -> None:
        self._case = case
        self._broker = broker
        self._airflow = airflow
        self._chance = random.Random(case.seed)
        self._dag_id = f"killed_{case.broker}"
        self._handled = str(case.folder / "handled.db")
        self._found = Found(case)
        self._runs: list[str] = []

    def execute(self) -> Found:
        self._airflow.wait_for_dag(self._dag_id, timeout=120)
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
        self._account()
        return self._found

    def _plan(self) -> Iterator[str]:
        """The kinds to kill, in turn, so that one run can see one of each."""
        left = self._case.kills
        while left > 0:
            turn = list(ORDER)[:left] if left < len(ORDER) else list(ORDER)
            # Of the last few too, whichever kinds.
            yield from sorted(self._chance.sample(ORDER, len(turn)), key=ORDER.index)
            left -= len(turn)

    # -- one run -------------------------------------------------------------------------------

    def _run(self, plan: Sequence[str]) -> list[str]:
        """One run, killed as planned; returns what of the plan is left."""
        # The turns that are left share the rest of the messages, and leave some, for a turn may
        # take more than one run; the last runs, in which nobody dies, take all.
        turns = 2 + len(plan) // len(ORDER)
        conf: dict[str, Any] = {"handled": self._handled}
        if plan:
            conf["max_messages"] = max(20, self._broker.waiting() // (2 * turns))
        run_id = self._airflow.trigger(self._dag_id, conf)
        self._runs.append(run_id)
        left, missed = list(plan), []
        while left:
            name = left[0]
            came = self._kill_one(run_id, name)
            if came is None:
                break
            left.pop(0)
            if not came:
                missed.append(name)
            if left and ORDER.index(left[0]) < ORDER.index(name):
                break  # this run's turn is over
        state = self._airflow.wait_for_run(self._dag_id, run_id, timeout=PATIENCE)
        if state != "success":
            failed = [
                task["task_id"]
                for task in self._airflow.task_instances(self._dag_id, run_id)
                if task["state"] not in ("success", "skipped")
            ]
            self._found.mistakes.append(f"run {run_id} ended as {state}: {failed}")
        self._case.tell(f"  run {len(self._runs)}: {state}, {self._broker.waiting()} messages left")
        return sorted(missed, key=ORDER.index) + left

    def _kill_one(self, run_id: str, name: str) -> bool | None:
        """Wait for a victim, let it work for a random while, kill it.

        Returns whether one died; ``None`` if the run is over.
        """
        kind = KINDS[name]
        part = self._chance.choice(kind.parts)
        patience = waits(self._chance, kind.span)
        # Half of the sensors die while they settle: that is, once all they watch has ended.
        settling = name == "ack" and self._chance.random() < 0.5
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            tasks = self._airflow.task_instances(self._dag_id, run_id)
            if self._airflow.dag_run(self._dag_id, run_id)["state"] in FINISHED:
                return None
            if _finished(task for task in tasks if task["task_id"] in kind.tasks):
                return False
            watched = (task for task in tasks if task["task_id"] not in KINDS["ack"].tasks)
            ready = not settling or _finished(watched)
            if ready and victims(self._airflow, self._dag_id, run_id, kind, part):
                time.sleep(patience)
                found = victims(self._airflow, self._dag_id, run_id, kind, part)
                if found:
                    self._strike(name, part, self._chance.choice(found))
                    return True
                patience /= 2  # it was faster: be faster with the next
            time.sleep(0.2)
        return None

    def _strike(self, name: str, part: str, target: Target) -> None:
        kill(target)
        self._found.killed[name] += 1
        self._case.tell(
            f"  kill {self._found.killed.total()} of {self._case.kills}: the {part} of"
            f" {target.task}, {target.state}"
        )

    # -- accounting ----------------------------------------------------------------------------

    def _account(self) -> None:
        found = self._found
        if self._broker.waiting() or self._broker.leased():
            found.mistakes.append(
                f"{self._broker.waiting()} messages and {self._broker.leased()} leases are left"
            )
        dead = Counter(letter.number for letter in self._broker.dead())
        calls = truth.noted(self._handled)
        done = {
            each.number for each in calls if not truth.fails_in_batch(each.number, each.attempt)
        }
        for number in range(self._case.messages):
            ends = dead[number] if truth.dies(number) else int(number in done)
            if not ends:
                found.lost.append(number)
        twice = sum(count - 1 for count in dead.values())
        both = [number for number in dead if not truth.dies(number)]
        found.duplicates = twice + len(both)
        found.unmarked = found.duplicates  # nobody who reads dead letters could tell
        self._count_repeats(calls)
        self._check_attempts(calls)
        self._check_reports()

    def _count_repeats(self, calls: Sequence[truth.Handled]) -> None:
        seen: set[tuple[str, int]] = set()
        batches: dict[str, set[str]] = {}
        ids: dict[int, str] = {}
        for each in calls:
            if ids.setdefault(each.number, each.message_id) != each.message_id:
                self._found.mistakes.append(f"message {each.number} has two ids")
            before = batches.setdefault(each.message_id, set())
            repeated = (each.message_id, each.attempt) in seen
            marked = each.redelivered or each.batch_id in before
            self._found.duplicates += repeated
            self._found.unmarked += bool(before) and not marked
            seen.add((each.message_id, each.attempt))
            before.add(each.batch_id)

    def _check_attempts(self, calls: Sequence[truth.Handled]) -> None:
        """The death of a task uses up no attempt."""
        used: dict[int, int] = {}
        for each in calls:
            used[each.number] = max(used.get(each.number, 0), each.attempt)
        used |= {letter.number: letter.attempt for letter in self._broker.dead()}
        wrong = [number for number, count in used.items() if count != truth.attempts(number)]
        if wrong:
            self._found.mistakes.append(f"messages {wrong[:10]} used a wrong number of attempts")

    def _check_reports(self) -> None:
        """Our own reports must balance, and agree with the queue."""
        totals: Counter[str] = Counter()
        reports = sorted((self._case.folder / "staging").rglob("report.json"))
        for path in reports:
            report = json.loads(path.read_text())
            totals.update(report["totals"])
            if not report["balanced"]:
                self._found.mistakes.append(f"{path} does not balance: {report['totals']}")
        if len(reports) != len(self._runs):
            self._found.mistakes.append(f"{len(self._runs)} runs left {len(reports)} reports")
        dead = len(self._broker.dead())
        told = {
            "dead_lettered": dead,
            "acked": self._case.messages - dead - self._broker.waiting(),
        }
        for name, count in told.items():
            if totals[name] != count:
                self._found.mistakes.append(
                    f"the reports say {totals[name]} {name}, the queue says {count}"
                )
