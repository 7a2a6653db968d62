"""Which batches processes died of: what a dying process cannot say itself.

A Spark application says in a file that it has begun, and in another that it has ended; a process
that runs a Python batcher's batches has begun with the file of its try.  One that began, never
ended, and is over has died.
Whoever begins the next try writes down, once, of which batches that may be: of all without an
outcome, or, where each batch was marked before it began, of those that had begun.  Marks cost a
file for each batch, so nobody makes any before something has died.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION, paths, read_json
from airflow_broadway.core.formats.plan import PlannedBatch

__all__ = ["TRIES", "WORK", "Deaths", "died_of", "mark_begun", "say_ended", "say_started"]

#: Where the tries of a task have their files: Spark applications, and processes of a Python
#: batcher.
WORK: Final = "work"
TRIES: Final = "tries"


def say_started(files: Files, name: str, number: int, folder: str) -> None:
    """Say that a Spark application begins to handle batches: before that it dies of none."""
    files.create(paths.started(name, number, folder), json.dumps({"version": VERSION}))


def say_ended(files: Files, name: str, number: int, folder: str) -> None:
    """Say that a try ended, and did not die of a batch.  Safe to repeat."""
    files.create(paths.ended(name, number, folder), json.dumps({"version": VERSION}))


def mark_begun(files: Files, name: str, number: int, folder: str, batch_id: str) -> None:
    """Say that a try is about to handle a batch."""
    files.create(f"{paths.begun(name, number, folder)}/{batch_id}", "{}")


def died_of(files: Files, plan: str, undecided: Sequence[PlannedBatch]) -> set[str]:
    """The ids of a plan's batches that processes may have died of; asked once none is at work.

    :param undecided: Its batches without an outcome.
    """
    found: set[str] = set()
    for folder in (WORK, TRIES) if undecided else ():
        tries = (re.fullmatch(r"(.+)-\d+\.json", file) for file in files.list(folder))
        for name in sorted({match[1] for match in tries if match}):
            deaths = Deaths(files, name, folder, inputs=paths.outcomes(plan))
            deaths.look(over=True)
            found.update(batch.batch_id for batch in undecided if deaths.of(batch))
    return found


class Deaths:
    """The deaths of one task in one run.

    :param name: The task's name in the staging folder.
    :param folder: Where its tries have their files: ``work`` or ``tries``.
    :param inputs: Of these alone that were at work on plans whose outcomes lie there.
    """

    def __init__(self, files: Files, name: str, folder: str, *, inputs: str = "") -> None:
        self._files = files
        self._name = name
        self._folder = folder
        self._inputs = inputs
        #: Tries so far.
        self.tries = 0
        self.count = 0
        self._began: set[int] = set()
        self._ended: set[int] = set()
        self._of_all = 0
        self._of: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()

    def look(self, *, over: bool) -> None:
        """Look who has died.

        :param over: Whether no try is at work any more: each that has not ended has died then.
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
        if self._inputs:
            self._began = {each for each in self._began - self._ended if self._was_on_inputs(each)}
        if over:
            for number in sorted(self._began - self._ended):
                self._note(number)
        self._read(sorted(self._began))

    def of(self, batch: PlannedBatch) -> int:
        """How many processes may have died of a batch that has no outcome; of a part, as a part."""
        return self._of[batch.batch_id] + (0 if batch.part else self._of_all)

    def alone(self, batch: PlannedBatch) -> int:
        """How many of them handled nothing else."""
        return self._alone[batch.batch_id]

    def ended(self, number: int) -> bool:
        """Whether a try ended without dying of a batch, as of the last look."""
        return number in self._ended

    def began(self, number: int) -> bool:
        """Whether a try began to handle batches, as of the last look."""
        return number in self._began

    def _was_on_inputs(self, number: int) -> bool:
        plans = self._about(number).get("plans", ())  # an older release did not say
        return any(paths.outcomes(plan) == self._inputs for plan in plans)

    def _about(self, number: int) -> dict[str, Any]:
        path = paths.of_try(self._name, number, self._folder)
        return read_json(self._files.read(path), path)

    def _note(self, number: int) -> None:
        path = paths.death(self._name, number, self._folder)
        if self._files.exists(path):
            return
        about = self._about(number)
        if "marked" not in about:  # of an older release, which did not say how it ended
            return
        batches: list[str] | None = None
        if about["marked"]:
            # Of all its plans, whoever asks: it is written once.
            folders = {paths.outcomes(plan) for plan in about.get("plans", ())}
            done = {name for folder in folders for name in self._files.list(folder)}
            begun = self._files.list(paths.begun(self._name, number, self._folder))
            batches = sorted(each for each in begun if f"{each}.json" not in done)
        value = {
            "version": VERSION,
            "task": self._name,
            "try": number,
            "batches": batches,
            "alone": len(about.get("only") or ()) == 1,
        }
        self._files.create(path, json.dumps(value))

    def _read(self, numbers: Iterable[int]) -> None:
        self.count = self._of_all = 0
        self._of.clear()
        self._alone.clear()
        there = set(self._files.list(f"deaths/{self._folder}"))
        for number in numbers:
            path = paths.death(self._name, number, self._folder)
            if path.rpartition("/")[2] not in there:
                continue
            death = read_json(self._files.read(path), path)
            self.count += 1
            if death["batches"] is None:  # nobody knows which had begun
                self._of_all += 1
                continue
            self._of.update(death["batches"])
            if death["alone"]:
                self._alone.update(death["batches"])
