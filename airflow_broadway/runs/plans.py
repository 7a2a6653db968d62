"""The plans of a run and their open batches, as the work to submit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.isolation import Step
from airflow_broadway.core.formats.ownership import Ownership, begin_try
from airflow_broadway.core.formats.parts import splits_of, with_parts
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.version import __version__
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun


class OpenPlans:
    """Plans of one run and their *open* batches, which have no outcome.

    :param plans: Paths of plans, in order.
    :raises StagingError: If a plan was written under another staging root, or is damaged.
    """

    def __init__(self, run: StagedRun, plans: Iterable[str]) -> None:
        self._run = run
        self.heads: list[BatchPlan] = []
        self._open: dict[str, list[PlannedBatch]] = {}
        #: Number of batches added by splits.
        self._more = 0
        for path in plans:
            head, batches = BatchPlan.read(run.files, path)
            run.store.check_root(head.root_id, head.host)
            self.heads.append(head)
            self._open[head.path] = list(batches)
        self.look()

    def look(self) -> None:
        """Reads the batches that got an outcome or were split since the last call."""
        for path, batches in self._open.items():
            done = set(self._run.files.list(paths.outcomes(path)))
            current = list(with_parts(batches, splits_of(self._run.files, path, done)))
            self._more += len(current) - len(batches)
            self._open[path] = [batch for batch in current if f"{batch.batch_id}.json" not in done]

    @property
    def total(self) -> int:
        """Number of batches in the plans."""
        return sum(head.batches for head in self.heads) + self._more

    @property
    def left(self) -> int:
        """Number of open batches at the last :meth:`look`."""
        return sum(map(len, self._open.values()))

    @property
    def generations(self) -> set[str]:
        """Generations whose messages are in the plans."""
        return {name for head in self.heads for name in head.generations}

    @property
    def open_generations(self) -> set[str]:
        """Generations whose messages are in open batches."""
        return {name for _, batch in self.open_batches() for name in batch.sources}

    @property
    def open_heads(self) -> list[BatchPlan]:
        """Plans with an open batch."""
        return [head for head in self.heads if self._open[head.path]]

    def void(self) -> dict[str, str]:
        """Returns the open batches whose messages this run no longer holds: id → reason."""
        ownership = Ownership(self._run.files, clock=self._run.clock, fresh_for=float("inf"))
        void: dict[str, str] = {}
        for _, batch in self.open_batches():
            try:
                ownership.check(batch.sources)
            except LeaseLapsed as error:
                void[batch.batch_id] = str(error)
        return void

    def key(self) -> str:
        """Returns a short hash of the plans."""
        text = json.dumps([head.path for head in self.heads])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open_batches(self) -> Iterator[tuple[BatchPlan, PlannedBatch]]:
        """Yields the open batches in order, each with its plan."""
        for head in self.heads:
            for batch in self._open[head.path]:
                yield head, batch

    def write_work(
        self,
        name: str,
        pipeline: Mapping[str, Any],
        run_info: RunInfo,
        step: Step | None = None,
        parent: str = "",
    ) -> tuple[str, Work]:
        """Writes the work file of the next try, which takes ownership from earlier tries.

        :param name: The task's name in the staging folder.
        :param pipeline: The pipeline's reference.
        :param step: The batches to handle; default: all open ones.
        :param parent: The execution of the task that starts the try.
        :returns: The file's path and its content.
        """
        step = step or Step()
        only = None if step.run is None else list(step.run)
        plans = [
            head.path
            for head in self.open_heads
            if only is None or any(batch.batch_id in only for batch in self._open[head.path])
        ]

        def work(number: int) -> Work:
            return Work(
                name=name,
                try_number=number,
                pipeline=dict(pipeline),
                run=run_info.to_json(),
                plans=plans,
                only=only,
                alone=step.alone,
                marked=step.marked,
                parent=parent,
                package_version=__version__,
            )

        number, path = begin_try(self._run.files, name, lambda number: work(number).dumps())
        return path, work(number)

    def reference(self) -> dict[str, Any]:
        """Returns the counts of batches and messages with outcomes, and the plans, for XCom."""
        counts = {"batches": 0, "failed": 0, "messages": 0, "failed_messages": 0}
        for outcome in Recorded(self._run).handled(self.heads):
            counts["batches"] += 1
            counts["failed"] += bool(outcome.error)
            counts["messages"] += outcome.successful + outcome.failed + outcome.missing
            counts["failed_messages"] += outcome.failed
        return {**counts, "plans": [head.path for head in self.heads]}
