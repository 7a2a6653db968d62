"""Kills the processes of one task instance in a real Airflow on this machine.

Each task has a supervisor, which talks to Airflow, and a child, which runs the operator.  A dead
child is noticed at once and tried again; a dead supervisor only once its heartbeats are missed, and
until then the child lives on beside the next try.  Spark adds a JVM and a Python driver, both of
which outlive their task.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from scripts.local_airflow import FINISHED, LocalAirflow

#: Seconds after which a run that does not end is an error.
PATIENCE = 400.0


class Kind(NamedTuple):
    """One kind of task.

    :param tasks: Its task ids.
    :param parts: What may be killed of it.
    :param span: Seconds from the moment at which there is something to kill, within which it dies.
    """

    tasks: Sequence[str]
    parts: Sequence[str]
    span: float


_TASK = ("child", "child", "supervisor", "task")

KINDS = {
    "process": Kind(("broadway.process",), _TASK, 4.0),
    "batch": Kind(("broadway.batch.even", "broadway.batch.odd"), _TASK, 4.0),
    "spark": Kind(("broadway.handle_batches",), ("jvm", "driver", *_TASK), 12.0),
    "ack": Kind(("broadway.ack",), _TASK, 1.0),
}

#: In which order tasks of these kinds run: what has its turn later can be killed later.
ORDER = tuple(KINDS)

_JVM, _DRIVER = "org.apache.spark.deploy.SparkSubmit", "airflow_broadway_job.py"
_SUPERVISOR = "airflow worker -- LocalExecutor"


class Target(NamedTuple):
    """Something that can be killed now."""

    task: str
    state: str
    processes: list[psutil.Process]


def victims(airflow: LocalAirflow, dag_id: str, run_id: str, kind: Kind, part: str) -> list[Target]:
    """The running task instances of a kind that have this part, each with its processes."""
    lines = dict(_lines(airflow))
    targets: list[Target] = []
    for task in airflow.task_instances(dag_id, run_id):
        if task["task_id"] not in kind.tasks or task["state"] != "running":
            continue
        chosen = [process for process, line in lines.items() if _is(part, line, str(task["id"]))]
        if chosen:
            index = task["map_index"]
            name = task["task_id"] + (f"[{index}]" if index >= 0 else "")
            targets.append(Target(name, f"try {task['try_number']}", chosen))
    return targets


def _lines(airflow: LocalAirflow) -> list[tuple[psutil.Process, str]]:
    lines = []
    for process in airflow.processes_of_tasks():
        with contextlib.suppress(psutil.Error):
            lines.append((process, " ".join(process.cmdline())))
    return lines


def _is(part: str, line: str, task: str) -> bool:
    if part == "jvm":
        return _JVM in line and _DRIVER in line
    if part == "driver":
        return _DRIVER in line and "python" in line.split(" ", 1)[0] and "--run" in line
    if task not in line:
        return False
    supervises = line.startswith(_SUPERVISOR)
    return part == "task" or supervises == (part == "supervisor")


def waits(chance: random.Random, span: float) -> float:
    """How long to let it work: often short, sometimes to the end of its span."""
    return span * chance.random() * chance.random()


def kill(target: Target) -> None:
    """``kill -9`` all of its processes."""
    for process in target.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Killer:
    """Kills tasks of runs of one DAG.

    :param struck: Told of each that died: its kind, and what it was.
    """

    def __init__(
        self,
        airflow: LocalAirflow,
        dag_id: str,
        chance: random.Random,
        struck: Callable[[str, str], None],
    ) -> None:
        self._airflow = airflow
        self._dag_id = dag_id
        self._chance = chance
        self._struck = struck

    def end_leftovers(self) -> None:
        """Ends the runs of a case that was interrupted: the first run here would wait for them."""
        for state in ("running", "queued"):
            response = self._airflow.api("GET", f"/dags/{self._dag_id}/dagRuns", state=state)
            for run in response["dag_runs"]:
                self._airflow.set_run_state(self._dag_id, run["dag_run_id"], "failed")

    def kill_one(self, run_id: str, name: str) -> bool | None:
        """Waits for a victim, lets it work for a random while, kills it.

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
                targets = victims(self._airflow, self._dag_id, run_id, kind, part)
                if targets:
                    target = self._chance.choice(targets)
                    kill(target)
                    self._struck(name, f"the {part} of {target.task}, {target.state}")
                    return True
                patience /= 2  # it was faster: be faster with the next
            time.sleep(0.2)
        return None

    def end_of(self, run_id: str) -> tuple[str, list[str]]:
        """Waits for the end of a run: its state, and what is wrong with that."""
        state = self._airflow.wait_for_run(self._dag_id, run_id, timeout=PATIENCE)
        if state == "success":
            return state, []
        failed = [
            task["task_id"]
            for task in self._airflow.task_instances(self._dag_id, run_id)
            if task["state"] not in ("success", "skipped")
        ]
        return state, [f"run {run_id} ended as {state}: {failed}"]


def _finished(tasks: Iterable[Mapping[str, Any]]) -> bool:
    """Whether tasks are through; those that were never made do not count."""
    ended = ("success", "failed", "skipped", "upstream_failed")
    return all(task["state"] in ended for task in tasks)
