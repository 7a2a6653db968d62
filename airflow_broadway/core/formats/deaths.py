"""Records which tries of a task died, and which batches they had in hand.

A *try* is one process that handles batches: a Spark application, a fork of a Python batcher's task,
or that task itself.  Its file says that it began, and another that it ended.  A try that began,
never ended, and is not at work any more has died, in one of two ways:

- *death*: its parent, the task that had started it, lived on and writes it down.  It tells against
  the batches that were in hand.
- *interruption*: the whole task died, as when a worker is preempted.  The next execution of the
  task, or the settlement of the run, writes it down.  It tells against nothing.

Batches in hand are known where each was marked before it began.  Marks cost a file for each batch,
so none are made before something has died.
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

#: Where the tries of a task have their files: Spark applications, and processes of a Python
#: batcher.
WORK: Final = "work"
TRIES: Final = "tries"


def say_started(files: Files, name: str, number: int, folder: str) -> None:
    """Record that a Spark application begins to handle batches: before that it dies of none."""
    files.create(paths.started(name, number, folder), json.dumps({"version": VERSION}))


def say_ended(files: Files, name: str, number: int, folder: str) -> None:
    """Record that a try ended, and did not die of a batch.  Safe to repeat."""
    files.create(paths.ended(name, number, folder), json.dumps({"version": VERSION}))


def mark_begun(files: Files, name: str, number: int, folder: str, batch_id: str) -> None:
    """Record that a try is about to handle a batch."""
    files.create(f"{paths.begun(name, number, folder)}/{batch_id}", "{}")


def interruptions_of(files: Files, plan: str) -> list[list[str]]:
    """Return the batches in hand at each interruption of tries that handled a plan.

    Writes down the interruptions that nobody has written down yet.  Call it once no try is at work.

    :returns: For each interruption the ids of the batches; none if they were not marked.
    """
    found: list[list[str]] = []
    for folder in (WORK, TRIES):
        tries = (re.fullmatch(r"(.+)-\d+\.json", file) for file in files.list(folder))
        for name in sorted({match[1] for match in tries if match}):
            deaths = Deaths(files, name, folder)
            deaths.look(over=None)
            found += deaths.interruptions_on(plan)
    return found


class Deaths:
    """The deaths and interruptions of one task in one run.

    :param name: The task's name in the staging folder.
    :param folder: Where its tries have their files: ``work`` or ``tries``.
    """

    def __init__(self, files: Files, name: str, folder: str) -> None:
        self._files = files
        self._name = name
        self._folder = folder
        #: Tries so far.
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
        """Read the tries, and write down those that died.

        :param parent: The execution of the task that asks.  Each of its tries that has not ended
            has died.
        :param over: The latest try of others that cannot be at work any more: up to it, those that
            have not ended were interrupted.  ``None``: all.
        """
        pattern = re.compile(re.escape(self._name) + r"-(\d+)\.(json|started|ended)")
        found: dict[str, set[int]] = {"json": set(), "started": set(), "ended": set()}
        for file in self._files.list(self._folder):
            match = pattern.fullmatch(file)
            if match:
                found[match[2]].add(int(match[1]))
        self.tries = max(found["json"], default=0)
        self._began = found["started" if self._folder == WORK else "json"]
        self._ended = found["ended"]
        self._read()
        for number in sorted(self._began - self._ended - self._deaths.keys()):
            if number in self._interruptions:
                continue
            if parent and self.is_child(number, parent):
                self._note(number, paths.death(self._name, number, self._folder))
            elif over is None or number <= over:
                self._note(number, paths.interruption(self._name, number, self._folder))
        self._read()
        self._count()

    @property
    def count(self) -> int:
        """Deaths, without interruptions."""
        return len(self._deaths)

    @property
    def interruptions(self) -> int:
        """How many tries died with the whole task."""
        return len(self._interruptions)

    def of(self, batch: PlannedBatch) -> int:
        """How many deaths may be of a batch that has no outcome; of a part, as a part."""
        return self._of[batch.batch_id] + (0 if batch.part else self._of_all)

    def alone(self, batch: PlannedBatch) -> int:
        """How many of these tries handled nothing else."""
        return self._alone[batch.batch_id]

    def interrupted(self, batch: PlannedBatch) -> int:
        """How many interruptions had the batch in hand."""
        return self._interrupted[batch.batch_id]

    def interrupted_alone(self, batch: PlannedBatch) -> int:
        """How many interruptions had nothing else in hand."""
        return self._interrupted_alone[batch.batch_id]

    def interruptions_on(self, plan: str) -> list[list[str]]:
        """Return the batches in hand at each interruption of a try that handled a plan."""
        outcomes = paths.outcomes(plan)
        return [
            list(note["batches"] or ())
            for note in self._interruptions.values()
            if any(paths.outcomes(each) == outcomes for each in note["plans"])
        ]

    def ended(self, number: int) -> bool:
        """Whether a try ended without dying of a batch, as of the last look."""
        return number in self._ended

    def began(self, number: int) -> bool:
        """Whether a try began to handle batches, as of the last look."""
        return number in self._began

    def is_child(self, number: int, parent: str) -> bool:
        """Whether an execution of the task started a try."""
        return bool(self._about(number).get("parent") == parent)

    def _about(self, number: int) -> dict[str, Any]:
        path = paths.of_try(self._name, number, self._folder)
        return read_json(self._files.read(path), path)

    def _note(self, number: int, path: str) -> None:
        about = self._about(number)
        batches: list[str] | None = None
        if about["marked"]:
            # Of all its plans, whichever is asked about: it is written once.
            folders = {paths.outcomes(plan) for plan in about["plans"]}
            done = {name for folder in folders for name in self._files.list(folder)}
            begun = self._files.list(paths.begun(self._name, number, self._folder))
            batches = sorted(each for each in begun if f"{each}.json" not in done)
        value = {
            "version": VERSION,
            "task": self._name,
            "try": number,
            "plans": about["plans"],
            "batches": batches,
            "alone": len(about["only"] or ()) == 1,
        }
        self._files.create(path, json.dumps(value))

    def _read(self) -> None:
        """Read what was written down since the last look."""
        for known, path_of in (
            (self._deaths, paths.death),
            (self._interruptions, paths.interruption),
        ):
            folder = path_of(self._name, 0, self._folder).rpartition("/")[0]
            there = set(self._files.list(folder)) if self._began else set()
            for number in sorted(self._began - known.keys()):
                path = path_of(self._name, number, self._folder)
                if path.rpartition("/")[2] in there:
                    known[number] = read_json(self._files.read(path), path)

    def _count(self) -> None:
        self._of_all = 0
        for counter in (self._of, self._alone, self._interrupted, self._interrupted_alone):
            counter.clear()
        for death in self._deaths.values():
            if death["batches"] is None:  # it is not known which had begun
                self._of_all += 1
                continue
            self._of.update(death["batches"])
            if death["alone"]:
                self._alone.update(death["batches"])
        for note in self._interruptions.values():
            in_hand: Sequence[str] = note["batches"] or ()
            self._interrupted.update(in_hand)
            if len(in_hand) == 1:
                self._interrupted_alone.update(in_hand)
