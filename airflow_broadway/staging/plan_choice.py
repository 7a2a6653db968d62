"""Which plans of a run count, and what has become of their batches.

A batcher's task may be tried or cleared any number of times, so a run may hold several plans of one
batcher.  Of the plans of the same generations one *stands*: the one with the most outcomes, and of
equals the newest.  Of the standing plans that hold a generation the newest decides about it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.entries import EntryLine, load_line
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.parts import Splits, splits_of, with_parts
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import checked
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)

#: Bytes of files of entries that memory keeps once they are read: of all, and of one at most.
KEPT_BYTES, KEPT_FILE_BYTES = 32 * 1024 * 1024, 256 * 1024

Sum = Mapping[str, Any]


class Recorded:
    """What is recorded of a run's batches; for one thread.

    Each file is read once: what is recorded later is not seen.  Outcomes and small files of entries
    are read many at a time, since each costs a round trip to an object store.
    """

    def __init__(self, run: StagedRun) -> None:
        self.run = run
        self._standing: dict[str, list[BatchPlan]] = {}
        #: By folder: the batches of the plan in it, with its parts in place of each that was split.
        self._batches: dict[str, list[PlannedBatch]] = {}
        #: By folder of outcomes: what was split in it.
        self._splits: dict[str, Splits] = {}
        #: By folder of outcomes: the ids of the batches that have one.
        self._ids: dict[str, set[str]] = {}
        #: By path, without the lines that they hold.
        self._outcomes: dict[str, Outcome] = {}
        #: By folder of outcomes: the files that have copies of many.
        self._gathered: dict[str, list[str]] = {}
        self._texts: dict[str, str] = {}
        self._kept = 0

    # -- plans ---------------------------------------------------------------------------------

    def standing(self, batcher: str) -> list[BatchPlan]:
        """The standing plans of a batcher, one for each set of generations, oldest first."""
        if batcher not in self._standing:
            top = f"batches/{batcher}"
            found = (self.standing_in(f"{top}/{name}") for name in self.run.files.list(top))
            plans = [each[1] for each in found if each is not None]
            self._standing[batcher] = sorted(plans, key=lambda plan: plan.path.rpartition("/")[2])
        return self._standing[batcher]

    def standing_in(self, folder: str) -> tuple[int, BatchPlan] | None:
        """The plan that stands, with how many outcomes it has; ``None`` if there is no plan.

        :param folder: ``batches/<batcher>/<inputs>``.
        """
        best: tuple[int, BatchPlan] | None = None
        for name in self.run.files.list(folder):  # oldest first
            try:
                plan, batches = BatchPlan.read(self.run.files, f"{folder}/{name}")
                recorded = self.ids(plan)
                held = self._batches[plan.path] = self._with_parts(plan, batches)
            except FileNotFoundError:  # never finished
                continue
            count = sum(batch.batch_id in recorded for batch in held) if recorded else 0
            if best is None or count >= best[0]:
                best = count, plan
        return best

    def counted(self, batcher: str) -> list[BatchPlan]:
        """The standing plans of a batcher, without void ones.

        A plan is void if none of its batches has an outcome and there is a newer one: ``process``
        was cleared before any batch was handled.
        """
        plans = self.standing(batcher)
        return [plan for plan in plans if plan is plans[-1] or self.ids(plan)]

    def deciding(self, batchers: Iterable[str], generation: str) -> list[BatchPlan]:
        """The plans that decide about a generation's messages: one for each batcher at most."""
        made: list[BatchPlan] = []
        for batcher in batchers:
            made += [plan for plan in self.standing(batcher) if generation in plan.generations][-1:]
        return made

    # -- outcomes ------------------------------------------------------------------------------

    def ids(self, plan: BatchPlan) -> set[str]:
        """The ids of the batches with an outcome, of all plans of the same generations.

        One that was split has none of its own: its parts have.
        """
        folder = paths.outcomes(plan.path)
        if folder not in self._ids:
            names = self.run.files.list(folder)
            self._splits[folder] = splits_of(self.run.files, plan.path, set(names))
            ids = {name.removesuffix(".json") for name in names if name.endswith(".json")}
            self._ids[folder] = ids - self._splits[folder].keys()
            self._gathered[folder] = [
                f"{folder}/{name}" for name in names if paths.is_gathered(name)
            ]
        return self._ids[folder]

    def recorded(self, plan: BatchPlan) -> dict[str, Outcome]:
        """The outcomes of a plan's batches by batch id; a batch without one is missing."""
        if not self.ids(plan):  # else a folder of outcomes is read for nothing
            return {}
        found = ((batch.batch_id, outcome) for batch, outcome in self.outcomes(plan))
        return {batch_id: outcome for batch_id, outcome in found if outcome is not None}

    def batches(self, plan: BatchPlan) -> list[PlannedBatch]:
        """The batches of a plan in order, with its parts in place of each that was split."""
        if plan.path not in self._batches:
            _, batches = BatchPlan.read(self.run.files, plan.path)
            self._batches[plan.path] = self._with_parts(plan, batches)
        return self._batches[plan.path]

    def split(self, plan: BatchPlan) -> int:
        """How many of a plan's batches, and of their parts, were split."""
        self.ids(plan)
        return len(self._splits[paths.outcomes(plan.path)])

    def _with_parts(self, plan: BatchPlan, batches: Iterable[PlannedBatch]) -> list[PlannedBatch]:
        self.ids(plan)
        return list(with_parts(batches, self._splits[paths.outcomes(plan.path)]))

    def outcomes(self, plan: BatchPlan) -> Iterator[tuple[PlannedBatch, Outcome | None]]:
        """The batches of a plan in order, each with its outcome where one is recorded.

        Entries that an outcome holds itself are taken out of it: :meth:`entries` reads them, like
        those in a file, by :attr:`Outcome.exceptions`.
        """
        batches = self.batches(plan)
        wanted = self._wanted(plan, batches)
        if any(path not in self._outcomes for path in wanted.values()):
            self._read_gathered(paths.outcomes(plan.path))
        self._read(wanted.values())
        for batch in batches:
            found = wanted.get(batch.batch_id)
            yield batch, None if found is None else self._outcomes[found]

    def outcomes_of(self, plan: BatchPlan, batches: Iterable[PlannedBatch]) -> dict[str, Outcome]:
        """The outcomes of a few of a plan's batches, by batch id; of the others nothing is read."""
        wanted = self._wanted(plan, batches)
        self._read(wanted.values())
        return {batch_id: self._outcomes[path] for batch_id, path in wanted.items()}

    def read_ahead(self, plan: BatchPlan, files: int) -> bool:
        """Read a plan's outcomes, unless that takes more than so many files; whether they are read.

        What has copies is cheap: a file of them holds a thousand outcomes.
        """
        wanted = self._wanted(plan, self.batches(plan)).values()
        folder = paths.outcomes(plan.path)
        gathered = self._gathered.get(folder, [])
        if len(gathered) > files:
            return False
        if any(path not in self._outcomes for path in wanted):
            self._read_gathered(folder)
        if sum(path not in self._outcomes for path in wanted) > files - len(gathered):
            return False
        self._read(wanted)
        return True

    def _wanted(self, plan: BatchPlan, batches: Iterable[PlannedBatch]) -> dict[str, str]:
        """Where the outcomes of batches are, by batch id; of those that have one."""
        recorded = self.ids(plan)
        return {
            batch.batch_id: paths.outcome(plan.path, batch.batch_id)
            for batch in batches
            if batch.batch_id in recorded
        }

    def _read(self, wanted: Iterable[str]) -> None:
        """Read the outcomes that are not read yet, many at a time."""
        missing = [path for path in wanted if path not in self._outcomes]
        for path, text in self.run.files.read_all(missing):
            if text is None:
                raise StagingDamaged(f"{path} is not there")
            self._take(Outcome.loads(text, path), path)

    def _read_gathered(self, folder: str) -> None:
        """Read the files that hold copies of many outcomes.

        A copy that is damaged is passed over: the outcome itself is read then.  A copy does not say
        that a batch has an outcome: only the names in the folder do.
        """
        for name, text in self.run.files.read_all(self._gathered.pop(folder, [])):
            for line in (text or "").split("\n")[:-1]:
                try:
                    outcome = Outcome.loads(line, name)
                except (StagingError, TypeError) as error:
                    log.warning("A copy of an outcome is passed over: %s", error)
                    continue
                self._take(outcome, f"{folder}/{outcome.batch_id}.json")

    def _take(self, outcome: Outcome, path: str) -> None:
        """Keep an outcome; of the lines that it holds as many bytes as there is room for."""
        if outcome.lines:
            text = "\n".join(outcome.lines)
            if self._kept + len(text) <= KEPT_BYTES:
                self._kept += len(text)
                self._texts[path] = text
            outcome = dataclasses.replace(outcome, lines=None, entries=path)
        self._outcomes[path] = outcome

    # -- entries -------------------------------------------------------------------------------

    def keep(self, files: Mapping[str, Sum | None]) -> None:
        """Read files of entries ahead, many at a time: the small ones, while memory has room.

        :param files: Path → what the file should add up to.
        """
        small = []
        for path, total in files.items():
            if path in self._texts or total is None or total["bytes"] > KEPT_FILE_BYTES:
                continue
            if self._kept + total["bytes"] > KEPT_BYTES:
                break
            self._kept += total["bytes"]
            small.append(path)
        for path, text in self.run.files.read_all(small):
            if text is None:
                raise StagingDamaged(f"{path} is not there")
            self._texts[path] = text

    def verify(self, path: str, total: Sum | None) -> int:
        """How many lines a file of entries has.

        :raises StagingDamaged: If it is not as it was written.
        """
        return sum(1 for _ in self._lines(path, total))

    def entries(self, path: str, total: Sum | None) -> Iterator[EntryLine]:
        """The lines of a file of entries.

        :raises StagingDamaged: At the latest at the end, if it is not as it was written.
        """
        for line in self._lines(path, total):
            try:
                found = load_line(line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StagingDamaged(f"{path} is damaged ({error!r})") from error
            yield found

    def _lines(self, path: str, total: Sum | None) -> Iterator[str]:
        text = self._texts.get(path)
        if text is None:
            return entry_lines(self.run.files, path, total)
        lines = text.split("\n")
        return checked(lines if lines[-1] else lines[:-1], total, path)


def planned_elsewhere(run: StagedRun, batcher: str, inputs: str) -> set[str]:
    """The generations in a batcher's plans of other inputs.

    :param inputs: The name of the folder ``batches/<batcher>/<inputs>`` that does not count.
    """
    top = f"batches/{batcher}"
    found: set[str] = set()
    for other in run.files.list(top):
        for name in run.files.list(f"{top}/{other}") if other != inputs else ():
            try:
                found.update(BatchPlan.read(run.files, f"{top}/{other}/{name}")[0].generations)
            except FileNotFoundError:  # never finished
                continue
    return found
