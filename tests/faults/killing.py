"""Whom to kill, and how: the processes of one task instance in a real Airflow on this machine.

Each task has a supervisor, which talks to Airflow, and a child, which runs the operator.  A dead
child is noticed at once and tried again; a dead supervisor only once its heartbeats are missed, and
until then the child lives on beside the next try.  Spark adds a JVM and a Python driver, both of
which outlive their task.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from scripts.local_airflow import LocalAirflow

__all__ = ["KINDS", "ORDER", "Kind", "Target", "victims"]


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
    found: list[Target] = []
    for task in airflow.task_instances(dag_id, run_id):
        if task["task_id"] not in kind.tasks or task["state"] != "running":
            continue
        chosen = [process for process, line in lines.items() if _is(part, line, str(task["id"]))]
        if chosen:
            index = task["map_index"]
            name = task["task_id"] + (f"[{index}]" if index >= 0 else "")
            found.append(Target(name, f"try {task['try_number']}", chosen))
    return found


def _lines(airflow: LocalAirflow) -> list[tuple[psutil.Process, str]]:
    found = []
    for process in airflow.processes_of_tasks():
        with contextlib.suppress(psutil.Error):
            found.append((process, " ".join(process.cmdline())))
    return found


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
