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
from collections.abc import Mapping, Sequence
from typing import Any, Final

from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.core.formats.plan import PlannedBatch

#: The folders of a task's tries: Spark applications, and processes of a Python batcher.
WORK: Final = "work"
TRIES: Final = "tries"
_DEATHS: Final = "deaths"
_INTERRUPTIONS: Final = "interruptions"


def say_started(files: Files, name: str, number: int, folder: str) -> None:
    """Records that a Spark application begins to handle batches: before that no batch kills it."""
    files.create(paths.of_try(name, number, folder, "started"), json.dumps({"version": VERSION}))


def say_ended(files: Files, name: str, number: int, folder: str) -> None:
    """Records that a try ended without dying of a batch.  Safe to repeat."""
    files.create(paths.of_try(name, number, folder, "ended"), json.dumps({"version": VERSION}))


def mark_begun(files: Files, name: str, number: int, folder: str, batch_id: str) -> None:
    """Records that a try is about to handle a batch."""
    files.create(f"{paths.begun(name, number, folder)}/{batch_id}", "{}")


def interruptions_of(files: Files, plan: str) -> list[list[str]]:
    """Returns the batches in hand at each interruption of tries that handled a plan.

    Also records interruptions that are not recorded yet.  Call it once no try is running.

    :returns: For each interruption the ids of the batches; empty if they were not marked.
    """
    outcomes = paths.outcomes(plan)
    interruptions: list[list[str]] = []
    for folder in (WORK, TRIES):
        tries = (re.fullmatch(r"(.+)-\d+\.json", file) for file in files.list(folder))
        for name in sorted({match[1] for match in tries if match}):
            deaths = Deaths(files, name, folder)
            deaths.look(over=None)
            interruptions += [
                record["batches"] or []
                for record in deaths.records.values()
                if record["interrupted"] and outcomes in map(paths.outcomes, record["plans"])
            ]
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
        #: The tries that began to handle batches, and those that ended without dying of one.
        self.began: set[int] = set()
        self.ended: set[int] = set()
        #: The tries that died, with their records.
        self.records: dict[int, dict[str, Any]] = {}
        #: How many tries died with the whole task.
        self.interruptions = 0
        self._of_all = 0
        self._of: Counter[str] = Counter()
        #: Batch → how many deaths of tries that handled nothing else may be of it.
        self.alone: Counter[str] = Counter()
        #: Batch → at how many interruptions it was in hand, and at how many nothing else was.
        self.interrupted: Counter[str] = Counter()
        self.interrupted_alone: Counter[str] = Counter()

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
        self.began = numbers["started" if self._folder == WORK else "json"]
        self.ended = numbers["ended"]
        unread = sorted(self.began - self.records.keys())
        recorded = {
            f"{kind}/{self._folder}/{file}"
            for kind in (_DEATHS, _INTERRUPTIONS)
            for file in (self._files.list(f"{kind}/{self._folder}") if unread else ())
        }
        for number in unread:
            death, interruption = (
                paths.death(self._name, number, self._folder, kind)
                for kind in (_DEATHS, _INTERRUPTIONS)
            )
            path = next((path for path in (death, interruption) if path in recorded), "")
            if not path and number not in self.ended:
                if parent and self.is_child(number, parent):
                    path = death
                elif over is None or number <= over:
                    path = interruption
                if path:
                    self._record_death(number, path)
            if path:
                record = read_json(self._files.read(path), path)
                self.records[number] = {**record, "interrupted": path == interruption}
                self._count(self.records[number])

    @property
    def count(self) -> int:
        """The number of deaths, without interruptions."""
        return len(self.records) - self.interruptions

    def of(self, batch: PlannedBatch) -> int:
        """Returns how many deaths may be of a batch without an outcome; of a part, as a part."""
        return self._of[batch.batch_id] + (0 if batch.part else self._of_all)

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

    def _count(self, record: Mapping[str, Any]) -> None:
        in_hand: Sequence[str] = record["batches"] or ()
        if record["interrupted"]:
            self.interruptions += 1
            self.interrupted.update(in_hand)
            self.interrupted_alone.update(in_hand if len(in_hand) == 1 else ())
        elif record["batches"] is None:  # the batches in hand are unknown
            self._of_all += 1
        else:
            self._of.update(in_hand)
            self.alone.update(in_hand if record["alone"] else ())
