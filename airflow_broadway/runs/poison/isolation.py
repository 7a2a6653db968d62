"""Chooses the batches that the next process of a task handles, under a budget.

The processes of a task run one after another: Spark applications, or forks of a Python batcher's
task.  Before each, :meth:`Isolation.choose` reads the recorded deaths, splits or dead-letters
batches, and chooses those that the process handles.  All state is in files, so another try of the
task continues from there.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from operator import call
from typing import Any

from airflow_broadway.core.errors import BroadwayError, LeaseLapsed
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.deaths import Deaths, say_ended
from airflow_broadway.core.formats.isolation import MOST_PROCESSES, OnRecord, Step, next_step
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.core.formats.ownership import Ownership, highest_try
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.model.connections import Connections, NoConnections
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.sinks import record_landed_batches, rule_out_batches
from airflow_broadway.runs.sources.pipelines import source_of, with_source
from airflow_broadway.staging.crash_records import CrashHistory, load_crash_history
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)


@dataclass
class Isolation:
    """The processes that one execution of a task starts in one run.

    A process that dies while this execution lives counts as a death.  A process of an earlier
    execution counts as interrupted: its whole task died, which proves nothing.

    :param name: The task's name in the staging folder.
    :param folder: The folder of its tries.
    :param connections: Resolves the connections of sinks.
    :param run: Runs work on sinks; in a child process if this process forks afterwards.
    :param most: See :data:`MOST_PROCESSES`.
    :param cleared: Number of times that the task was cleared; each clear renews the budget.
    """

    staged: StagedRun
    pipeline: Pipeline
    plans: OpenPlans
    name: str
    _: KW_ONLY
    folder: str
    connections: Connections = field(default_factory=NoConnections)
    run: Callable[[Callable[[], object]], object] = call
    most: int = MOST_PROCESSES
    cleared: int = 0

    def __post_init__(self) -> None:
        #: The id of this execution in the files of the tries that it starts.
        self.parent = uuid.uuid4().hex
        #: The batches of the next process.
        self.step = Step()
        #: The last try of earlier executions.
        self._earlier: int | None = None
        #: Processes that had begun when the last step was chosen.
        self._begun = 0
        self._deaths = Deaths(self.staged.files, self.name, self.folder)
        self._on_record: dict[str, OnRecord] = {}

    def choose(self, *, over: bool = True) -> bool:
        """Chooses the batches of the next process; returns ``False`` if there is none to start.

        :param over: Whether no process is running any more, so that every unfinished one has died.
        """
        if self._earlier is None:
            self._earlier = highest_try(self.staged.files, self.name, self.folder)
            if not self._earlier and not self._suspects:
                return self.plans.left > 0
        if highest_try(self.staged.files, self.name, self.folder):
            self._on_sinks(record_landed_batches, self.plans)
        while True:
            open_batches = self._read_open_batches(over=over)
            if not open_batches:
                return False
            deaths = self._deaths
            begun = deaths.tries - deaths.interruptions - self._before_clear
            if deaths.count and begun >= self.most:
                log.error(
                    "%s of this task have begun in this run, and %d of them died: no more is begun;"
                    " messages without an outcome are released, and a later run receives them.",
                    pluralize(begun, "process"),
                    deaths.count,
                )
                return False
            self._read_records(open_batches)
            self.step = step = next_step(
                [batch for _, batch in open_batches],
                deaths,
                max_crashes=self.pipeline.producer.max_crashes,
                proven=len(open_batches) < self.plans.total,
                suspects=self._suspects,
                on_record=self._on_record,
            )
            if not step.split and not step.aside:
                self._restrict_to_one_plan(open_batches)
                self._begun = deaths.tries
                return True
            heads = {batch.batch_id: head for head, batch in open_batches}
            if not self._split_and_dead_letter(heads, step):
                return False

    @cached_property
    def _before_clear(self) -> int:
        """The processes begun before the last clear, which the budget excludes."""
        files = self.staged.files
        path = paths.budget(self.name, self.cleared, self.folder)
        names = files.list(f"budgets/{self.folder}")
        # Before the first clear all processes count.
        cleared = any(name.startswith(f"{self.name}-") for name in names)
        begun = self._deaths.tries - self._deaths.interruptions if cleared else 0
        files.create(path, json.dumps({"version": VERSION, "before": begun}))
        return int(read_json(files.read(path), path)["before"])

    def goes_on(self) -> bool:
        """Whether another process must follow the finished one."""
        if not self._read_open_batches(over=True):
            return False
        last = self._deaths.tries
        if last == self._begun or last not in self._deaths.began:
            return False  # it did not reach a batch, nor would another one
        if not self._deaths.is_child(last, self.parent):
            return False  # another execution of the task has taken over
        if last not in self._deaths.ended:
            return True
        chosen = self.step.run
        # It ended normally: it could not handle the batches that it left open.
        return chosen is not None and not {
            batch.batch_id for _, batch in self.plans.open_batches()
        }.intersection(chosen)

    def stopped(self) -> None:
        """Records that the task stops its running process; called before that is killed."""
        number = highest_try(self.staged.files, self.name, self.folder)
        try:
            say_ended(self.staged.files, self.name, number, self.folder)
        except (BroadwayError, OSError) as error:
            log.warning("Could not record that a process was stopped: %s", error)

    @property
    def has_deaths(self) -> bool:
        """Whether a process of the task died in this run while the task lived."""
        return self._deaths.count > 0

    @property
    def careful(self) -> bool:
        """Whether a batch may kill its process: one died before, or there are suspects."""
        return self.has_deaths or self._deaths.interruptions > 0 or self._suspects

    # -- parts ---------------------------------------------------------------------------------

    @cached_property
    def _suspects(self) -> bool:
        """Whether messages are redelivered and the pipeline has crashes on record."""
        came_again = any(batch.redelivered for _, batch in self.plans.open_batches())
        return came_again and self._history.crashes > 0

    @cached_property
    def _history(self) -> CrashHistory:
        run = self.staged
        return load_crash_history(run.store, run.pipeline, run.clock.now())

    def _read_records(self, open_batches: list[tuple[BatchPlan, PlannedBatch]]) -> None:
        """Reads the crash records of the messages of each batch."""
        if not self._suspects or not self._history.in_hand:
            return
        from airflow_broadway.staging.isolation import on_record  # loads pyarrow

        for plan in self.plans.heads:
            batches = [
                batch
                for head, batch in open_batches
                if head is plan and batch.redelivered and batch.batch_id not in self._on_record
            ]
            if batches:
                self._on_record |= on_record(self.staged, plan, batches, self._history)

    def _read_open_batches(self, *, over: bool) -> list[tuple[BatchPlan, PlannedBatch]]:
        """Returns the open batches whose messages the run still holds."""
        self.plans.look()
        void = self.plans.void()
        batches = [batch for batch in self.plans.open_batches() if batch[1].batch_id not in void]
        if batches:
            earlier = self._earlier or 0
            # The last one may still run on a cluster.
            self._deaths.look(parent=self.parent, over=earlier if over else earlier - 1)
        return batches

    def _restrict_to_one_plan(self, open_batches: list[tuple[BatchPlan, PlannedBatch]]) -> None:
        """Restricts a process that runs batches one by one to the batches of one plan."""
        step = self.step
        if not step.alone or not step.run:
            return
        plan_of = {batch.batch_id: head.path for head, batch in open_batches}
        first = plan_of[step.run[0]]
        self.step = step._replace(run=[name for name in step.run if plan_of[name] == first])

    def _split_and_dead_letter(self, heads: dict[str, BatchPlan], step: Step) -> bool:
        """Splits and dead-letters batches; returns ``False`` if the lease has lapsed."""
        from airflow_broadway.staging.isolation import dead_letter, split  # loads pyarrow

        by = f"{self.name} on {host_name()}"
        ownership = Ownership(
            self.staged.files,
            self.name,
            self._deaths.tries,
            folder=self.folder,
            clock=self.staged.clock,
        )
        source = source_of(self.staged, self.plans.generations)
        producer = with_source(self.pipeline, source).producer
        try:
            # Its parts are batches of their own: its own commit must not land any more.
            chosen = [*(batch for batch, _ in step.split), *step.aside]
            self._on_sinks(rule_out_batches, heads, chosen)
            self.plans.look()
            left = {batch.batch_id for _, batch in self.plans.open_batches()}
            for batch, parts in step.split:
                if batch.batch_id not in left:
                    continue
                split(self.staged, heads[batch.batch_id], batch, parts, by=by)
            for batch in step.aside:
                if batch.batch_id not in left:
                    continue
                dead_letter(
                    self.staged,
                    heads[batch.batch_id],
                    batch,
                    producer,
                    crashes=self._crash_reason(batch),
                    ownership=ownership,
                    by=by,
                    history=self._history if self._suspects else None,
                )
        except LeaseLapsed as error:
            log.error("%s.", error)
            return False
        return True

    def _on_sinks(self, work: Callable[..., object], *arguments: Any) -> None:
        """Calls a function of :mod:`airflow_broadway.runs.sinks`, if a batch has a sink."""
        if any(head.sink for head in self.plans.heads):
            context = self.staged, self.pipeline, *arguments, self.connections
            self.run(lambda: work(*context))

    def _crash_reason(self, batch: PlannedBatch) -> str:
        """Returns the reason for dead-lettering a message, as text."""
        alone = self._deaths.alone[batch.batch_id]
        if alone >= self.pipeline.producer.max_crashes:
            return f"it ended {pluralize(alone, 'process')} that handled nothing else"
        record = self._on_record.get(batch.batch_id, OnRecord())
        died = self._deaths.interrupted_alone[batch.batch_id] + record.alone
        return f"it was the only message in hand when {pluralize(died, 'task')} died"
