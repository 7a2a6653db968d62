"""Records the tries that died, and the batches in hand at each death.

A *try* is one process that handles batches: a Spark application, a fork of a Python batcher's task,
or that task itself.  One file records its start, and another its end.  A try that began, never
ended and no longer runs has died, in one of two ways:

- *death*: its parent, the task that started it, survived and records it.  It counts against the
  batches in hand.
- *interruption*: the whole task died, as when a worker is preempted.  The next execution of the
  task, or the settlement of the run, records it.  It counts against no batch.

Batches in hand are known if each was marked before it began.  Marks cost one file per batch, so
none are written before the first death.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION, paths, read_json
from airflow_broadway.core.formats.plan import PlannedBatch

#: The folders of a task's tries: Spark applications, and processes of a Python batcher.
WORK: Final = "work"
TRIES: Final = "tries"


def say_started(files: Files, name: str, number: int, folder: str) -> None:
    """Records that a Spark application begins to handle batches: before that no batch kills it."""
    files.create(paths.started(name, number, folder), json.dumps({"version": VERSION}))


def say_ended(files: Files, name: str, number: int, folder: str) -> None:
    """Records that a try ended without dying of a batch.  Safe to repeat."""
    files.create(paths.ended(name, number, folder), json.dumps({"version": VERSION}))


def mark_begun(files: Files, name: str, number: int, folder: str, batch_id: str) -> None:
    """Records that a try is about to handle a batch."""
    files.create(f"{paths.begun(name, number, folder)}/{batch_id}", "{}")


def interruptions_of(files: Files, plan: str) -> list[list[str]]:
    """Returns the batches in hand at each interruption of tries that handled a plan.

    Also records interruptions that are not recorded yet.  Call it once no try is running.

    :returns: For each interruption the ids of the batches; empty if they were not marked.
    """
    interruptions: list[list[str]] = []
    for folder in (WORK, TRIES):
        tries = (re.fullmatch(r"(.+)-\d+\.json", file) for file in files.list(folder))
        for name in sorted({match[1] for match in tries if match}):
            deaths = Deaths(files, name, folder)
            deaths.look(over=None)
            interruptions += deaths.interruptions_on(plan)
    return interruptions


class Deaths:
    """The deaths and interruptions of one task in one run.

    :param name: The task's name in the staging folder.
    :param folder: The folder of its tries: ``work`` or ``tries``.
    """

    def __init__(self, files: Files, name: str, folder: str) -> None:
        self._files = files
        self._name = name
        self._folder = folder
        #: The number of tries so far.
        self.tries = 0
        self._began: set[int] = set()
        self._ended: set[int] = set()
        self._deaths: dict[int, dict[str, Any]] = {}
        self._interruptions: dict[int, dict[str, Any]] = {}
        self._of_all = 0
        self._of: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()
        self._interrupted: Counter[str] = Counter()
        self._interrupted_alone: Counter[str] = Counter()

    def look(self, *, parent: str = "", over: int | None = 0) -> None:
        """Reads the tries, and records those that died.

        :param parent: The execution of the calling task.  Each of its tries that has not ended has
            died.
        :param over: The latest try of other executions that cannot be running any more: up to it,
            those that have not ended were interrupted.  ``None``: all.
        """
        pattern = re.compile(re.escape(self._name) + r"-(\d+)\.(json|started|ended)")
        numbers: dict[str, set[int]] = {"json": set(), "started": set(), "ended": set()}
        for file in self._files.list(self._folder):
            match = pattern.fullmatch(file)
            if match:
                numbers[match[2]].add(int(match[1]))
        self.tries = max(numbers["json"], default=0)
        self._began = numbers["started" if self._folder == WORK else "json"]
        self._ended = numbers["ended"]
        self._read_records()
        for number in sorted(self._began - self._ended - self._deaths.keys()):
            if number in self._interruptions:
                continue
            if parent and self.is_child(number, parent):
                self._record_death(number, paths.death(self._name, number, self._folder))
            elif over is None or number <= over:
                path = paths.interruption(self._name, number, self._folder)
                self._record_death(number, path)
        self._read_records()
        self._count()

    @property
    def count(self) -> int:
        """The number of deaths, without interruptions."""
        return len(self._deaths)

    @property
    def interruptions(self) -> int:
        """The number of tries that died with the whole task."""
        return len(self._interruptions)

    def of(self, batch: PlannedBatch) -> int:
        """Returns how many deaths may be of a batch without an outcome; of a part, as a part."""
        return self._of[batch.batch_id] + (0 if batch.part else self._of_all)

    def alone(self, batch: PlannedBatch) -> int:
        """Returns how many of these tries handled nothing else."""
        return self._alone[batch.batch_id]

    def interrupted(self, batch: PlannedBatch) -> int:
        """Returns at how many interruptions the batch was in hand."""
        return self._interrupted[batch.batch_id]

    def interrupted_alone(self, batch: PlannedBatch) -> int:
        """Returns at how many interruptions nothing else was in hand."""
        return self._interrupted_alone[batch.batch_id]

    def interruptions_on(self, plan: str) -> list[list[str]]:
        """Returns the batches in hand at each interruption of a try that handled a plan."""
        outcomes = paths.outcomes(plan)
        return [
            list(record["batches"] or ())
            for record in self._interruptions.values()
            if any(paths.outcomes(path) == outcomes for path in record["plans"])
        ]

    def ended(self, number: int) -> bool:
        """Returns whether a try ended without dying of a batch, as of the last :meth:`look`."""
        return number in self._ended

    def began(self, number: int) -> bool:
        """Returns whether a try began to handle batches, as of the last :meth:`look`."""
        return number in self._began

    def is_child(self, number: int, parent: str) -> bool:
        """Returns whether an execution of the task started a try."""
        return bool(self._read_try(number).get("parent") == parent)

    def _read_try(self, number: int) -> dict[str, Any]:
        path = paths.of_try(self._name, number, self._folder)
        return read_json(self._files.read(path), path)

    def _record_death(self, number: int, path: str) -> None:
        work = self._read_try(number)
        batches: list[str] | None = None
        if work["marked"]:
            # Of all its plans, whatever the caller's plan: a death is recorded once.
            folders = {paths.outcomes(plan) for plan in work["plans"]}
            done = {name for folder in folders for name in self._files.list(folder)}
            begun = self._files.list(paths.begun(self._name, number, self._folder))
            batches = sorted(batch_id for batch_id in begun if f"{batch_id}.json" not in done)
        value = {
            "version": VERSION,
            "task": self._name,
            "try": number,
            "plans": work["plans"],
            "batches": batches,
            "alone": len(work["only"] or ()) == 1,
        }
        self._files.create(path, json.dumps(value))

    def _read_records(self) -> None:
        """Reads what was recorded since the last :meth:`look`."""
        for records, path_of in (
            (self._deaths, paths.death),
            (self._interruptions, paths.interruption),
        ):
            folder = path_of(self._name, 0, self._folder).rpartition("/")[0]
            names = set(self._files.list(folder)) if self._began else set()
            for number in sorted(self._began - records.keys()):
                path = path_of(self._name, number, self._folder)
                if path.rpartition("/")[2] in names:
                    records[number] = read_json(self._files.read(path), path)

    def _count(self) -> None:
        self._of_all = 0
        for counter in (self._of, self._alone, self._interrupted, self._interrupted_alone):
            counter.clear()
        for death in self._deaths.values():
            if death["batches"] is None:  # the batches in hand are unknown
                self._of_all += 1
                continue
            self._of.update(death["batches"])
            if death["alone"]:
                self._alone.update(death["batches"])
        for interruption in self._interruptions.values():
            in_hand: Sequence[str] = interruption["batches"] or ()
            self._interrupted.update(in_hand)
            if len(in_hand) == 1:
                self._interrupted_alone.update(in_hand)
