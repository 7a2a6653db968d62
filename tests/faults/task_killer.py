"""Kills the processes of one task instance in a real Airflow on this machine.

Each task has a supervisor, which calls Airflow's API, and a child, which runs the operator.  When a
child dies, Airflow retries the task immediately.  It detects a dead supervisor only by missed
heartbeats; until then the child may run concurrently with the next try.  Spark adds a JVM and a
Python driver, which outlive their task.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from scripts.local_airflow import FINISHED, LocalAirflow

#: Seconds within which a run must end.
RUN_TIMEOUT = 400.0


class TaskKind(NamedTuple):
    """A kind of task that can be killed.

    :param tasks: The task ids.
    :param parts: The processes that can be killed; ``task`` means all of them.
    :param max_delay: Maximum seconds from the start of the process to its kill.
    """

    tasks: Sequence[str]
    parts: Sequence[str]
    max_delay: float


_TASK = ("child", "child", "supervisor", "task")

TASK_KINDS = {
    "process": TaskKind(("broadway.process",), _TASK, 4.0),
    "batch": TaskKind(("broadway.batch.even", "broadway.batch.odd"), _TASK, 4.0),
    "spark": TaskKind(("broadway.handle_batches",), ("jvm", "driver", *_TASK), 12.0),
    "ack": TaskKind(("broadway.ack",), _TASK, 1.0),
}

#: The order in which the kinds of task run, and so can be killed.
KIND_ORDER = tuple(TASK_KINDS)

_JVM, _DRIVER = "org.apache.spark.deploy.SparkSubmit", "airflow_broadway_job.py"
_SUPERVISOR = "airflow worker -- LocalExecutor"


class Target(NamedTuple):
    """The processes of a running task instance."""

    task: str
    state: str
    processes: list[psutil.Process]


def find_targets(
    airflow: LocalAirflow, dag_id: str, run_id: str, kind: TaskKind, part: str
) -> list[Target]:
    """Finds the running task instances of a kind that have this part."""
    lines = dict(_command_lines(airflow))
    targets: list[Target] = []
    for task in airflow.task_instances(dag_id, run_id):
        if task["task_id"] not in kind.tasks or task["state"] != "running":
            continue
        processes = [
            process for process, line in lines.items() if _matches(part, line, str(task["id"]))
        ]
        if processes:
            index = task["map_index"]
            name = task["task_id"] + (f"[{index}]" if index >= 0 else "")
            targets.append(Target(name, f"try {task['try_number']}", processes))
    return targets


def _command_lines(airflow: LocalAirflow) -> list[tuple[psutil.Process, str]]:
    lines = []
    for process in airflow.processes_of_tasks():
        with contextlib.suppress(psutil.Error):
            lines.append((process, " ".join(process.cmdline())))
    return lines


def _matches(part: str, line: str, task: str) -> bool:
    if part == "jvm":
        return _JVM in line and _DRIVER in line
    if part == "driver":
        return _DRIVER in line and "python" in line.split(" ", 1)[0] and "--run" in line
    if task not in line:
        return False
    supervises = line.startswith(_SUPERVISOR)
    return part == "task" or supervises == (part == "supervisor")


def random_delay(rng: random.Random, max_delay: float) -> float:
    """Draws the seconds until a kill: mostly short, at most ``max_delay``."""
    return max_delay * rng.random() * rng.random()


def kill(target: Target) -> None:
    """Kills all processes of a target with SIGKILL."""
    for process in target.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Killer:
    """Kills tasks of a DAG's runs.

    :param on_kill: Called after each kill with the kind of task and a description of the target.
    """

    def __init__(
        self,
        airflow: LocalAirflow,
        dag_id: str,
        rng: random.Random,
        on_kill: Callable[[str, str], None],
    ) -> None:
        self._airflow = airflow
        self._dag_id = dag_id
        self._rng = rng
        self._on_kill = on_kill

    def fail_leftover_runs(self) -> None:
        """Fails the runs of an interrupted case, which would block the first new run."""
        for state in ("running", "queued"):
            response = self._airflow.api("GET", f"/dags/{self._dag_id}/dagRuns", state=state)
            for run in response["dag_runs"]:
                self._airflow.set_run_state(self._dag_id, run["dag_run_id"], "failed")

    def kill_one(self, run_id: str, name: str) -> bool | None:
        """Waits for a target and kills it after a random delay.

        Returns whether a task was killed; ``None`` if the run is over.
        """
        kind = TASK_KINDS[name]
        part = self._rng.choice(kind.parts)
        delay = random_delay(self._rng, kind.max_delay)
        # Kill half of the sensors while they settle: after all upstream tasks have ended.
        settling = name == "ack" and self._rng.random() < 0.5
        limit = time.monotonic() + RUN_TIMEOUT
        while time.monotonic() < limit:
            tasks = self._airflow.task_instances(self._dag_id, run_id)
            if self._airflow.dag_run(self._dag_id, run_id)["state"] in FINISHED:
                return None
            if _finished(task for task in tasks if task["task_id"] in kind.tasks):
                return False
            watched = (task for task in tasks if task["task_id"] not in TASK_KINDS["ack"].tasks)
            ready = not settling or _finished(watched)
            if ready and find_targets(self._airflow, self._dag_id, run_id, kind, part):
                time.sleep(delay)
                targets = find_targets(self._airflow, self._dag_id, run_id, kind, part)
                if targets:
                    target = self._rng.choice(targets)
                    kill(target)
                    self._on_kill(name, f"the {part} of {target.task}, {target.state}")
                    return True
                delay /= 2  # the task ended before the kill
            time.sleep(0.2)
        return None

    def wait_for_end(self, run_id: str) -> tuple[str, list[str]]:
        """Waits for the end of a run; returns its state, and a problem if that is not success."""
        state = self._airflow.wait_for_run(self._dag_id, run_id, timeout=RUN_TIMEOUT)
        if state == "success":
            return state, []
        failed = [
            task["task_id"]
            for task in self._airflow.task_instances(self._dag_id, run_id)
            if task["state"] not in ("success", "skipped")
        ]
        return state, [f"run {run_id} ended as {state}: {failed}"]


def _finished(tasks: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether all these task instances have ended."""
    ended = ("success", "failed", "skipped", "upstream_failed")
    return all(task["state"] in ended for task in tasks)
