"""The batches that Spark runs: selects open ones, and reads the results of the application.

The host starts the application: see
:class:`airflow_broadway.operators.spark_submit.BroadwaySparkSubmitOperator`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from enum import Enum
from typing import Any

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.deaths import WORK
from airflow_broadway.core.formats.isolation import MOST_PROCESSES
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize, without_outcome
from airflow_broadway.runs.outcomes import is_settled, log_settled
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.poison.isolation import Isolation
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.sources.pipelines import source_of
from airflow_broadway.staging.errors import SETTING
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)


class Ending(Enum):
    """The state of the batches."""

    #: There are no batches.
    EMPTY = "empty"
    #: Every batch has an outcome.
    DONE = "done"
    #: Batches without an outcome were released before they could be handled.
    RELEASED = "released"
    #: Batches without an outcome cannot get one: the run no longer holds their messages.
    VOID = "void"
    #: Some batches have no outcome, and another try may handle them.
    OPEN = "open"


@dataclass
class SparkBatches:
    """The batches of plans in one execution of the task that submits them to Spark.

    :param planned: The references of the batch tasks.
    :param name: The task's name in the staging folder.
    :param most: Maximum number of applications that the run may start, once one has died.
    :raises StagingError: If a batch task wrote its plan under another staging root, or a plan does
        not exist.
    """

    staged: StagedRun
    pipeline: Pipeline
    planned: InitVar[Iterable[Mapping[str, Any]]]
    ports: Ports
    _: KW_ONLY
    name: str = ""
    most: int = MOST_PROCESSES
    cleared: int = 0

    def __post_init__(self, planned: Iterable[Mapping[str, Any]]) -> None:
        references = list(planned)
        self.staged.store.check_roots(references)
        planned_by = {str(row["plan"]): row for row in references if row.get("plan")}
        try:
            self.plans = OpenPlans(self.staged, planned_by)
        except FileNotFoundError:
            raise StagingError(self._missing_plans(planned_by)) from None
        for head in self.plans.open_heads:
            head.check_sink(self.pipeline.batchers[head.batcher].commits_uri)
        #: Chooses the batches of each application.
        self.isolation = Isolation(
            self.staged,
            self.pipeline,
            self.plans,
            self.name,
            folder=WORK,
            connections=self.ports.connections,
            most=self.most,
            cleared=self.cleared,
        )
        #: Open batches that cannot get an outcome, as of the last check: id → reason.
        self.void: dict[str, str] = {}

    def _missing_plans(self, planned_by: Mapping[str, Mapping[str, Any]]) -> str:
        """Returns a sentence about plans that are not in the staging folder.

        :param planned_by: Path of a plan → the reference of its batch task.
        """
        files = self.staged.files
        missing = [path for path in planned_by if not files.exists(f"{path}/plan.jsonl")]
        hosts = sorted({repr(planned_by[path]["host"]) for path in missing})
        return (
            f"{pluralize(len(missing), 'plan')} of batches that host {', '.join(hosts)} wrote are"
            f" not in {self.staged.store.uri}/{self.staged.path} as host {host_name()!r} sees it,"
            f" though the root has the same id: set {SETTING} to a folder that all hosts share if"
            " one root is a copy of another, or clear the batch tasks if the files were removed"
        )

    def begin(self) -> Ending:
        """Checks the batches; an application must be started if they are :attr:`Ending.OPEN`."""
        plans = self.plans
        ending = self._ending()
        if ending is Ending.DONE:
            log.info("%s, each with an outcome: nothing to do.", pluralize(plans.total, "batch"))
        elif ending is Ending.OPEN:
            log.info("%s yet.", without_outcome(plans.left - len(self.void), plans.total))
        elif ending is Ending.VOID and all(
            is_settled(self.staged, g) for g in plans.open_generations
        ):
            log.info(
                "%s without an outcome; the messages were released: the run was settled before they"
                " were handled.",
                pluralize(len(self.void), "batch"),
            )
            ending = Ending.RELEASED
        if ending in (Ending.DONE, Ending.RELEASED):
            log_settled(self.staged, plans.heads)
        return ending

    @property
    def sink_connections(self) -> list[str]:
        """Ids of the connections that the sinks of its batchers name."""
        sinks = (self.pipeline.batchers[head.batcher].sink for head in self.plans.heads)
        return sorted({name for sink in sinks if sink for name in sink.connection_ids})

    def leases_kept(self) -> AbstractContextManager[None]:
        """Renews leases while the application runs, and settles at the end, if no sensor does.

        A paused Dag's sensor is not rescheduled, and Spark may run for hours.
        """
        from airflow_broadway.runs.watch import RunWatcher  # loads pyarrow

        generations = self.plans.generations
        watcher = RunWatcher(self.staged, self.pipeline, generations=generations, ports=self.ports)
        return watcher.standing_in()

    def write_work(self, name: str, ref: Mapping[str, Any], info: RunInfo) -> tuple[str, Work]:
        """Writes the work of the application just before its start; returns path and content.

        :param name: The task's name in the staging folder.
        :param ref: The pipeline's reference.
        :param info: The info of this run; its source is replaced by that of the batches.
        """
        source = source_of(self.staged, self.plans.generations)
        isolation = self.isolation
        return self.plans.write_work(
            name, ref, replace(info, source=source), isolation.step, isolation.parent
        )

    def end(self) -> Ending:
        """Reads the results of the application."""
        self.plans.look()
        return self._ending()

    def _ending(self) -> Ending:
        plans = self.plans
        if not plans.heads:
            return Ending.EMPTY
        if not plans.left:
            return Ending.DONE
        self.void = plans.void()
        return Ending.VOID if len(self.void) == plans.left else Ending.OPEN
