"""The pipelines and task states of a Dag run, from Airflow's database.

The Dag's code is not imported: the serialized Dag has the operator of each task.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow.models.dagrun import DagRun
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from sqlalchemy import select
from sqlalchemy.orm import Session

from airflow_broadway.plugin.declared import Declared, arguments_of, kind_of

#: States by precedence: a task has the first of these that any of its instances has.
_ORDER: Final = (
    *("failed", "upstream_failed", "running", "restarting", "deferred", "up_for_reschedule"),
    *("up_for_retry", "queued", "scheduled", "none", "removed", "success", "skipped"),
)


@dataclass(frozen=True, slots=True)
class Instance:
    """A task instance; its state is Airflow's, or ``"none"``."""

    map_index: int
    state: str
    try_number: int
    started_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def of(cls, row: TaskInstance) -> Instance:
        state = str(row.state or "none")
        return cls(row.map_index, state, row.try_number, row.start_date, row.end_date)


class Link(NamedTuple):
    """An operator's extra link, such as to Spark's history; available when a task has ended.

    :param url: As returned by the operator; not necessarily a valid URL.
    """

    name: str
    url: str
    map_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """A task of a pipeline.

    :param kind: ``process``, ``batch``, ``spark``, ``ack``, or ``run``: all in one.
    """

    task_id: str
    kind: str
    downstream: frozenset[str]
    instances: Sequence[Instance]
    links: Sequence[Link] = ()

    @property
    def state(self) -> str:
        """The aggregate state of its instances: the most severe one."""
        states = {instance.state for instance in self.instances} or {"none"}
        return min(states, key=lambda state: _ORDER.index(state) if state in _ORDER else 0)

    @property
    def seconds(self) -> float | None:
        """Seconds from the first start to the last end; ``None`` before all have ended."""
        starts = [instance.started_at for instance in self.instances if instance.started_at]
        ends = [instance.ended_at for instance in self.instances if instance.ended_at]
        if not starts or len(ends) < len(self.instances):
            return None
        return (max(ends) - min(starts)).total_seconds()

    @property
    def counts(self) -> Mapping[str, int]:
        """State → number of instances."""
        return Counter(instance.state for instance in self.instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTasks(Declared):
    """A pipeline of a run's Dag, and its tasks."""

    tasks: Sequence[StageTask]

    def of_kind(self, *kinds: str) -> list[StageTask]:
        """Returns its tasks of these kinds."""
        return [task for task in self.tasks if task.kind in kinds]

    def batch_task(self, batcher: str) -> StageTask | None:
        """Returns the task that plans a batcher's batches, by its name in a task group."""
        for task in self.of_kind("batch"):
            if task.task_id == f"batch.{batcher}" or task.task_id.endswith(f".batch.{batcher}"):
                return task
        tasks = self.of_kind("batch")
        return tasks[0] if len(tasks) == 1 else None

    def handling_task(self, batcher: str) -> StageTask | None:
        """Returns the task that handles a batcher's batches: the Spark task, or the batch task."""
        batch = self.batch_task(batcher)
        if batch is None:
            return None
        spark = [task for task in self.of_kind("spark") if task.task_id in batch.downstream]
        return spark[0] if spark else batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTasks:
    """A Dag run in Airflow.

    :param state: Its state in Airflow; ``None`` if Airflow has no such run.
    :param pipelines: In the order of the Dag.
    """

    state: str | None
    pipelines: Sequence[PipelineTasks] = ()

    @property
    def going_on(self) -> bool:
        """Whether the run has not finished."""
        return self.state in ("queued", "running")


def tasks_of_run(dag_id: str, run_id: str) -> RunTasks:
    """Returns a run and its pipelines."""
    with create_session() as session:
        query = select(DagRun.state).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        state = session.scalar(query)
        if state is None:
            return RunTasks(state=None)
        return RunTasks(state=str(state), pipelines=_load_pipelines(session, dag_id, run_id))


def _load_pipelines(session: Session, dag_id: str, run_id: str) -> list[PipelineTasks]:
    query = select(TaskInstance).where(TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id)
    query = query.order_by(TaskInstance.task_id, TaskInstance.map_index)
    instances = session.scalars(query).all()
    # The Dag version of this run: a newer one may have other tasks.
    version = next((row.dag_version_id for row in instances if row.dag_version_id), None)
    dag = SerializedDagModel
    row = session.scalar(select(dag).where(dag.dag_id == dag_id, dag.dag_version_id == version))
    members_of: dict[str, list[tuple[dict[str, Any], StageTask]]] = {}
    for attributes in map(arguments_of, row.data["dag"]["tasks"] if row and row.data else ()):
        kind = kind_of(attributes)
        if kind is None:
            continue
        task_id = str(attributes["task_id"])
        task = StageTask(
            task_id=task_id,
            kind=kind,
            downstream=frozenset(attributes.get("downstream_task_ids", ())),
            instances=[Instance.of(row) for row in instances if row.task_id == task_id],
            links=_load_links(session, dag_id, run_id, attributes),
        )
        members_of.setdefault(_pipeline_key(attributes["pipeline"]), []).append((attributes, task))
    return [_build_pipeline(session, dag_id, run_id, members) for members in members_of.values()]


def _pipeline_key(reference: Any) -> str:
    """Returns the part of a reference that all tasks of a pipeline share."""
    if isinstance(reference, Mapping):
        reference = [reference.get("class"), reference.get("options") or {}]
    return json.dumps(reference, sort_keys=True, default=str)


def _load_links(session: Session, dag_id: str, run_id: str, task: Mapping[str, Any]) -> list[Link]:
    """Returns the extra links of a task: names from the serialized Dag, URLs from XCom."""
    names = {key: name for name, key in (task.get("_operator_extra_links") or {}).items()}
    if not names:
        return []
    query = select(XComModel).where(
        XComModel.dag_id == dag_id,
        XComModel.run_id == run_id,
        XComModel.task_id == task["task_id"],
        XComModel.key.in_(names),
    )
    rows = session.scalars(query.order_by(XComModel.map_index, XComModel.key)).all()
    values = [(row, XComModel.deserialize_value(row)) for row in rows]
    return [
        Link(names[row.key], value, row.map_index)
        for row, value in values
        if isinstance(value, str) and value
    ]


def _build_pipeline(
    session: Session, dag_id: str, run_id: str, members: Sequence[tuple[dict[str, Any], StageTask]]
) -> PipelineTasks:
    attributes, tasks = members[0][0], [task for _, task in members]
    staging = next((task["staging"] for task, _ in members if task["staging"]), None)
    if staging is not None and "{" in staging:
        staging = _load_root(session, dag_id, run_id, [task.task_id for task in tasks])
    return PipelineTasks.of(dag_id, {**attributes, "staging": staging}, tasks=tasks)


def _load_root(session: Session, dag_id: str, run_id: str, task_ids: Sequence[str]) -> str | None:
    """Returns the rendered staging root, from a task that has run."""
    fields = RenderedTaskInstanceFields
    query = select(fields.rendered_fields).where(
        fields.dag_id == dag_id, fields.run_id == run_id, fields.task_id.in_(task_ids)
    )
    roots = (row.get("staging") for row in session.scalars(query) if row)
    return next((str(root) for root in roots if root), None)
