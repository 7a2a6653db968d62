"""A Dag run's tasks as Airflow's database has them: which pipelines it has, and how far each is.

The Dag's own code is not loaded: its serialized form says which operator a task is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

from airflow_broadway.plugin.declared import arguments_of, kind_of

#: What the states of a task's instances come to: the first of these that any of them has.
_ORDER: Final = (
    *("failed", "upstream_failed", "running", "restarting", "deferred", "up_for_reschedule"),
    *("up_for_retry", "queued", "scheduled", "none", "removed", "success", "skipped"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A task instance; its state is Airflow's, ``"none"`` before it has one."""

    map_index: int
    state: str
    try_number: int
    started_at: datetime | None
    ended_at: datetime | None


class Link(NamedTuple):
    """What an operator's extra link leads to, such as Spark's history; known when a task has ended.

    :param url: As the operator gave it: it may be no address of a page at all.
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
        """What the states of its instances come to: what wants a look comes first."""
        states = {each.state for each in self.instances} or {"none"}
        return min(states, key=lambda state: _ORDER.index(state) if state in _ORDER else 0)

    @property
    def seconds(self) -> float | None:
        """From the first instance's start to the last one's end; ``None`` before all have ended."""
        starts = [each.started_at for each in self.instances if each.started_at]
        ends = [each.ended_at for each in self.instances if each.ended_at]
        if not starts or len(ends) < len(self.instances):
            return None
        return (max(ends) - min(starts)).total_seconds()

    @property
    def counts(self) -> Mapping[str, int]:
        """State → instances."""
        return Counter(each.state for each in self.instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTasks:
    """The tasks of one pipeline in a run.

    :param name: Its name, as far as the Dag says it; else that of its class.
    :param broker: The short name of its broker's kind; empty where the Dag does not say.
    :param batchers: The engine of each, as far as the Dag says.
    :param staging: The staging root that its tasks were given; ``None``: ``[broadway] staging``.
    """

    name: str
    broker: str
    batchers: Mapping[str, str]
    staging: str | None
    tasks: Sequence[StageTask]

    def of_kind(self, *kinds: str) -> list[StageTask]:
        """Its tasks that do this."""
        return [task for task in self.tasks if task.kind in kinds]

    def batch_task(self, batcher: str) -> StageTask | None:
        """The task that makes a batcher's batches, by its name in a task group."""
        for task in self.of_kind("batch"):
            if task.task_id == f"batch.{batcher}" or task.task_id.endswith(f".batch.{batcher}"):
                return task
        tasks = self.of_kind("batch")
        return tasks[0] if len(tasks) == 1 else None

    def handling_task(self, batcher: str) -> StageTask | None:
        """The task that handles a batcher's batches: Spark's, or the batcher's own."""
        batch = self.batch_task(batcher)
        if batch is None:
            return None
        spark = [task for task in self.of_kind("spark") if task.task_id in batch.downstream]
        return spark[0] if spark else batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTasks:
    """A Dag run as Airflow knows it.

    :param state: Airflow's; ``None`` of a run that it does not know.
    :param pipelines: In the order of the Dag.
    """

    state: str | None
    pipelines: Sequence[PipelineTasks] = ()

    @property
    def going_on(self) -> bool:
        """Whether its tasks are still to begin or to end."""
        return self.state in ("queued", "running")


def tasks_of_run(dag_id: str, run_id: str) -> RunTasks:
    """A run, and the pipelines in it."""
    with create_session() as session:
        wanted = select(DagRun.state).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        state = session.scalar(wanted)
        if state is None:
            return RunTasks(state=None)
        return RunTasks(state=str(state), pipelines=_pipelines(session, dag_id, run_id))


def _pipelines(session: Session, dag_id: str, run_id: str) -> list[PipelineTasks]:
    instances = _instances(session, dag_id, run_id)
    data = _serialized(session, dag_id, instances)
    if data is None:
        return []
    found: dict[str, list[tuple[Mapping[str, Any], StageTask]]] = {}
    for about in _ours(data):
        task_id = str(about["task_id"])
        rows = [_instance(row) for row in instances if row.task_id == task_id]
        task = StageTask(
            task_id=task_id,
            kind=about["kind"],
            downstream=frozenset(about.get("downstream_task_ids", ())),
            instances=rows,
            links=_links(session, dag_id, run_id, about),
        )
        found.setdefault(_which(about["pipeline"]), []).append((about, task))
    return [_pipeline(session, dag_id, run_id, members) for members in found.values()]


def _which(reference: Any) -> str:
    """What the tasks of one pipeline have in common of their references."""
    if isinstance(reference, Mapping):
        reference = [reference.get("class"), reference.get("options") or {}]
    return json.dumps(reference, sort_keys=True, default=str)


def _instances(session: Session, dag_id: str, run_id: str) -> Sequence[TaskInstance]:
    wanted = select(TaskInstance).where(
        TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id
    )
    return session.scalars(wanted.order_by(TaskInstance.task_id, TaskInstance.map_index)).all()


def _instance(row: TaskInstance) -> Instance:
    return Instance(
        map_index=row.map_index,
        state=str(row.state or "none"),
        try_number=row.try_number,
        started_at=row.start_date,
        ended_at=row.end_date,
    )


def _links(session: Session, dag_id: str, run_id: str, about: Mapping[str, Any]) -> list[Link]:
    """The extra links of a task: their names stand in the stored Dag, where they lead in XCom."""
    names = {key: name for name, key in (about.get("_operator_extra_links") or {}).items()}
    if not names:
        return []
    wanted = select(XComModel).where(
        XComModel.dag_id == dag_id,
        XComModel.run_id == run_id,
        XComModel.task_id == about["task_id"],
        XComModel.key.in_(names),
    )
    rows = session.scalars(wanted.order_by(XComModel.map_index, XComModel.key)).all()
    found = [(row, XComModel.deserialize_value(row)) for row in rows]
    return [
        Link(names[row.key], value, row.map_index)
        for row, value in found
        if isinstance(value, str) and value
    ]


def _serialized(
    session: Session, dag_id: str, instances: Sequence[TaskInstance]
) -> Mapping[str, Any] | None:
    """The Dag as it was for this run: a newer version may have other tasks."""
    wanted = select(SerializedDagModel).where(SerializedDagModel.dag_id == dag_id)
    version = next((each.dag_version_id for each in instances if each.dag_version_id), None)
    if version is None:
        return None
    row = session.scalar(wanted.where(SerializedDagModel.dag_version_id == version))
    return None if row is None else row.data


def _ours(data: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """What a serialized Dag says of our tasks, those of mapped ones as of others."""
    for each in data["dag"]["tasks"]:
        about = arguments_of(each)
        kind = kind_of(about)
        if kind is not None:
            yield {**about, "kind": kind}


def _pipeline(
    session: Session,
    dag_id: str,
    run_id: str,
    members: Sequence[tuple[Mapping[str, Any], StageTask]],
) -> PipelineTasks:
    about = members[0][0]
    staging = next((each["staging"] for each, _ in members if each["staging"]), None)
    if staging is not None and "{" in staging:
        task_ids = [task.task_id for _, task in members]
        staging = _rendered(session, dag_id, run_id, task_ids)
    reference = about["pipeline"] if isinstance(about["pipeline"], Mapping) else {}
    known = reference.get("about") or {}
    given = (reference.get("options") or {}).get("name")
    class_name = str(reference.get("class", "")).rpartition(":")[2].rpartition(".")[2]
    return PipelineTasks(
        name=str(known.get("name") or given or class_name),
        broker=str(known.get("broker") or ""),
        batchers=known.get("batchers") or {},
        staging=staging,
        tasks=[task for _, task in members],
    )


def _rendered(session: Session, dag_id: str, run_id: str, task_ids: Sequence[str]) -> str | None:
    """The staging root of a template, as it was rendered for a task that has run."""
    fields = RenderedTaskInstanceFields
    wanted = select(fields.rendered_fields).where(
        fields.dag_id == dag_id, fields.run_id == run_id, fields.task_id.in_(task_ids)
    )
    for row in session.scalars(wanted):
        if row and row.get("staging"):
            return str(row["staging"])
    return None
