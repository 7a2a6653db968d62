"""Chooses the plans of a run that count, and reads the outcomes of their batches.

A batcher's task may be retried or cleared any number of times, so a run may have several plans of
one batcher.  Of the plans of the same generations one is *standing*: the one with most outcomes,
or else the newest.  Of the standing plans with a generation the newest decides about it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.entries import EntryLine, load_line
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.parts import Splits, splits_of, with_parts
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import checked
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)

#: Maximum bytes of entry files that are kept in memory: in total, and of one file.
KEPT_BYTES, KEPT_FILE_BYTES = 32 * 1024 * 1024, 256 * 1024

Sum = Mapping[str, Any]


class Recorded:
    """A reader of the plans, outcomes and entries of a run; for one thread.

    Each file is read once, so later changes are not seen.  Outcomes and small entry files are read
    concurrently, since each costs a round trip to an object store.
    """

    def __init__(self, run: StagedRun) -> None:
        self.run = run
        self._standing: dict[str, list[BatchPlan]] = {}
        #: By batcher: all plans, standing or not.
        self._plans: dict[str, dict[str, BatchPlan]] = {}
        #: By folder: the batches of its plan, with the parts in place of each split batch.
        self._batches: dict[str, list[PlannedBatch]] = {}
        #: By folder of outcomes: the splits in it.
        self._splits: dict[str, Splits] = {}
        #: By folder of outcomes: the ids of the batches with an outcome.
        self._ids: dict[str, set[str]] = {}
        #: By path, without their inline lines.
        self._outcomes: dict[str, Outcome] = {}
        #: By folder of outcomes: the files with copies of many.
        self._gathered: dict[str, list[str]] = {}
        self._texts: dict[str, str] = {}
        self._text_bytes = 0

    # -- plans ---------------------------------------------------------------------------------

    def standing(self, batcher: str) -> list[BatchPlan]:
        """Returns the standing plans of a batcher, one per set of generations, oldest first."""
        if batcher not in self._standing:
            top = f"batches/{batcher}"
            standing = (self.standing_in(f"{top}/{name}") for name in self.run.files.list(top))
            plans = [pair[1] for pair in standing if pair is not None]
            self._standing[batcher] = sorted(plans, key=lambda plan: plan.path.rpartition("/")[2])
        return self._standing[batcher]

    def standing_in(self, folder: str) -> tuple[int, BatchPlan] | None:
        """Returns the standing plan and its number of outcomes; ``None`` if there is no plan.

        :param folder: ``batches/<batcher>/<inputs>``.
        """
        best: tuple[int, BatchPlan] | None = None
        for name in self.run.files.list(folder):  # oldest first
            try:
                plan, batches = BatchPlan.read(self.run.files, f"{folder}/{name}")
                recorded = self.ids(plan)
                planned = self._batches[plan.path] = self._with_parts(plan, batches)
            except FileNotFoundError:  # never finished
                continue
            self._plans.setdefault(plan.batcher, {})[plan.path] = plan
            count = sum(batch.batch_id in recorded for batch in planned) if recorded else 0
            if best is None or count >= best[0]:
                best = count, plan
        return best

    def plans(self, batcher: str) -> list[BatchPlan]:
        """Returns all plans of a batcher, standing or not."""
        self.standing(batcher)
        return list(self._plans.get(batcher, {}).values())

    def forget_outcomes(self) -> None:
        """Reads again which outcomes exist, at the next use."""
        for known in (self._standing, self._batches, self._splits, self._ids, self._gathered):
            known.clear()

    def counted(self, batcher: str) -> list[BatchPlan]:
        """Returns the standing plans of a batcher that are not void.

        A plan is void if none of its batches has an outcome and there is a newer plan: ``process``
        was cleared before any batch was handled.
        """
        plans = self.standing(batcher)
        return [plan for plan in plans if plan is plans[-1] or self.ids(plan)]

    def deciding(self, batchers: Iterable[str], generation: str) -> list[BatchPlan]:
        """Returns the plans that decide about a generation's messages, at most one per batcher."""
        plans: list[BatchPlan] = []
        for batcher in batchers:
            plans += [p for p in self.standing(batcher) if generation in p.generations][-1:]
        return plans

    # -- outcomes ------------------------------------------------------------------------------

    def ids(self, plan: BatchPlan) -> set[str]:
        """Returns the ids of the batches with an outcome, of all plans of the same generations.

        A split batch has no outcome, only its parts have.
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
        """Reads the outcomes of a plan's batches by batch id, without batches that have none."""
        if not self.ids(plan):  # saves reading the plan
            return {}
        outcomes = ((batch.batch_id, outcome) for batch, outcome in self.outcomes(plan))
        return {batch_id: outcome for batch_id, outcome in outcomes if outcome is not None}

    def batches(self, plan: BatchPlan) -> list[PlannedBatch]:
        """Reads the batches of a plan in order, with the parts in place of each split batch."""
        if plan.path not in self._batches:
            _, batches = BatchPlan.read(self.run.files, plan.path)
            self._batches[plan.path] = self._with_parts(plan, batches)
        return self._batches[plan.path]

    def split(self, plan: BatchPlan) -> int:
        """Counts the batches and parts of a plan that were split."""
        self.ids(plan)
        return len(self._splits[paths.outcomes(plan.path)])

    def _with_parts(self, plan: BatchPlan, batches: Iterable[PlannedBatch]) -> list[PlannedBatch]:
        self.ids(plan)
        return list(with_parts(batches, self._splits[paths.outcomes(plan.path)]))

    def outcomes(self, plan: BatchPlan) -> Iterator[tuple[PlannedBatch, Outcome | None]]:
        """Yields the batches of a plan in order, each with its outcome if one is recorded.

        Inline entries are removed from the outcomes: :meth:`entries` reads them, like those in a
        file, by :attr:`Outcome.exceptions`.
        """
        batches = self.batches(plan)
        outcome_paths = self._outcome_paths(plan, batches)
        if any(path not in self._outcomes for path in outcome_paths.values()):
            self._read_gathered(paths.outcomes(plan.path))
        self._read(outcome_paths.values())
        for batch in batches:
            path = outcome_paths.get(batch.batch_id)
            yield batch, None if path is None else self._outcomes[path]

    def handled(self, plans: Iterable[BatchPlan]) -> Iterator[Outcome]:
        """Yields the recorded outcomes of plans, in order."""
        for plan in plans:
            yield from (outcome for _, outcome in self.outcomes(plan) if outcome is not None)

    def outcomes_of(self, plan: BatchPlan, batches: Iterable[PlannedBatch]) -> dict[str, Outcome]:
        """Reads the outcomes of some of a plan's batches, by batch id."""
        outcome_paths = self._outcome_paths(plan, batches)
        self._read(outcome_paths.values())
        return {batch_id: self._outcomes[path] for batch_id, path in outcome_paths.items()}

    def read_ahead(self, plan: BatchPlan, files: int) -> bool:
        """Reads a plan's outcomes if they are in at most ``files`` files; returns whether it did.

        Copies are cheap: one file holds a thousand outcomes.
        """
        outcome_paths = self._outcome_paths(plan, self.batches(plan)).values()
        folder = paths.outcomes(plan.path)
        gathered = self._gathered.get(folder, [])
        if len(gathered) > files:
            return False
        if any(path not in self._outcomes for path in outcome_paths):
            self._read_gathered(folder)
        if sum(path not in self._outcomes for path in outcome_paths) > files - len(gathered):
            return False
        self._read(outcome_paths)
        return True

    def _outcome_paths(self, plan: BatchPlan, batches: Iterable[PlannedBatch]) -> dict[str, str]:
        """Returns the paths of the outcomes by batch id, of batches that have one."""
        recorded = self.ids(plan)
        return {
            batch.batch_id: paths.outcome(plan.path, batch.batch_id)
            for batch in batches
            if batch.batch_id in recorded
        }

    def _read(self, outcome_paths: Iterable[str]) -> None:
        """Reads the outcomes that are not read yet, concurrently."""
        missing = [path for path in outcome_paths if path not in self._outcomes]
        for path, text in self.run.files.read_all(missing):
            if text is None:
                raise StagingDamaged(f"{path} is not there")
            self._take(Outcome.loads(text, path), path)

    def _read_gathered(self, folder: str) -> None:
        """Reads the files with copies of many outcomes.

        A damaged copy is skipped, and the outcome itself is read.  A copy does not prove that a
        batch has an outcome: only the file names in the folder do.
        """
        for name, text in self.run.files.read_all(self._gathered.pop(folder, [])):
            for line in (text or "").split("\n")[:-1]:
                try:
                    outcome = Outcome.loads(line, name)
                except (StagingError, TypeError) as error:
                    log.warning("A copy of an outcome is skipped: %s", error)
                    continue
                self._take(outcome, f"{folder}/{outcome.batch_id}.json")

    def _take(self, outcome: Outcome, path: str) -> None:
        """Keeps an outcome, and its inline lines up to :data:`KEPT_BYTES` in total."""
        if outcome.lines:
            text = "\n".join(outcome.lines)
            if self._text_bytes + len(text) <= KEPT_BYTES:
                self._text_bytes += len(text)
                self._texts[path] = text
            outcome = dataclasses.replace(outcome, lines=None, entries=path)
        self._outcomes[path] = outcome

    # -- entries -------------------------------------------------------------------------------

    def keep(self, files: Mapping[str, Sum | None]) -> None:
        """Reads small entry files ahead, concurrently, up to :data:`KEPT_BYTES` in total.

        :param files: Path → the expected checksum of the file.
        """
        small = []
        for path, total in files.items():
            if path in self._texts or total is None or total["bytes"] > KEPT_FILE_BYTES:
                continue
            if self._text_bytes + total["bytes"] > KEPT_BYTES:
                break
            self._text_bytes += total["bytes"]
            small.append(path)
        for path, text in self.run.files.read_all(small):
            if text is None:
                raise StagingDamaged(f"{path} is not there")
            self._texts[path] = text

    def verify(self, path: str, total: Sum | None) -> int:
        """Counts the lines of an entry file.

        :raises StagingDamaged: If the file is damaged.
        """
        return sum(1 for _ in self._lines(path, total))

    def entries(self, path: str, total: Sum | None) -> Iterator[EntryLine]:
        """Yields the lines of an entry file.

        :raises StagingDamaged: At the latest at the end, if the file is damaged.
        """
        for line in self._lines(path, total):
            try:
                entry = load_line(line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StagingDamaged(f"{path} is damaged ({error!r})") from error
            yield entry

    def _lines(self, path: str, total: Sum | None) -> Iterator[str]:
        text = self._texts.get(path)
        if text is None:
            return entry_lines(self.run.files, path, total)
        lines = text.split("\n")
        return checked(lines if lines[-1] else lines[:-1], total, path)


def planned_in(run: StagedRun, folders: Iterable[str]) -> set[str]:
    """Returns the generations in the plans of folders ``batches/<batcher>/<inputs>``."""
    seen: set[str] = set()
    for folder in folders:
        for name in run.files.list(folder):
            try:
                seen.update(BatchPlan.read(run.files, f"{folder}/{name}")[0].generations)
            except FileNotFoundError:  # never finished
                continue
    return seen
