"""Pipelines declared by Dags, and their tasks in a run, from Airflow's database.

No user code is imported: the serialized Dags have the operator of each task.

Each task of a pipeline carries its reference: the path of the class, the overrides, and the
attributes known when the Dag was parsed (name, broker, producers and batchers).  A class referenced
as text has no attributes; such a pipeline is named after its class, unless overridden.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple, Self

from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.dagrun import DagRun
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.serialization.enums import Encoding
from airflow.utils.session import create_session
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from airflow_broadway.runs.backlog.reports import PipelineKey

#: Operator module → kind of task.
_KINDS: Final = {
    "airflow_broadway.operators.process": "process",
    "airflow_broadway.operators.batch": "batch",
    "airflow_broadway.operators.spark_submit": "spark",
    "airflow_broadway.operators.run": "run",
    "airflow_broadway.sensors.ack": "ack",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A pipeline declared by a Dag.

    :param path: The path of its class.
    :param broker: The short name of the broker's kind; ``None`` if unknown.
    :param producers: The number of tasks that receive; ``None`` if unknown.
    :param batchers: Batcher → engine; ``None`` if unknown.
    :param staging: The pipeline's own staging root; ``None``: that of Airflow's configuration.
    :param paused: Whether the Dag is paused.
    """

    dag_id: str
    name: str
    path: str
    broker: str | None = None
    producers: int | None = None
    batchers: Mapping[str, str] | None = None
    staging: str | None = None
    paused: bool = False

    @property
    def key(self) -> PipelineKey:
        """The key of its last report."""
        return PipelineKey(self.name, self.dag_id)

    @classmethod
    def of(cls, dag_id: str, task: Mapping[str, Any], **fields: Any) -> Self:
        """Parses the reference of one of its tasks; all is empty if Airflow has truncated it.

        :param task: From :func:`arguments_of`.
        """
        reference = task["pipeline"] if isinstance(task["pipeline"], Mapping) else {}
        path, options = str(reference.get("class", "")), reference.get("options") or {}
        attributes = reference.get("about") or {}
        default_name = options.get("name") or path.rpartition(":")[2].rpartition(".")[2]
        producers, staging = attributes.get("producers"), task["staging"]
        return cls(
            dag_id=dag_id,
            name=str(attributes.get("name", default_name)),
            path=path,
            broker=attributes.get("broker"),
            producers=producers if isinstance(producers, int) else None,
            batchers=attributes.get("batchers"),
            staging=staging if isinstance(staging, str) else None,
            **fields,
        )


def declared_in(dag_id: str, dag: Mapping[str, Any]) -> list[Declared]:
    """Returns the pipelines of a serialized Dag, in the order of its tasks; one for each name.

    :param dag: The Dag as serialized by Airflow.
    """
    pipelines: dict[str, Declared] = {}
    for stored in dag["dag"].get("tasks", ()):
        task = arguments_of(stored)
        pipeline = Declared.of(dag_id, task)
        if kind_of(task) in ("process", "run") and pipeline.path:
            pipelines.setdefault(pipeline.name, pipeline)
    return list(pipelines.values())


def arguments_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a serialized task, including those of a mapped task."""
    task = stored.get(Encoding.VAR, stored)
    partial = task.get("partial_kwargs") or {}
    kwargs = {**partial.get(Encoding.VAR, partial), **task}
    return {**kwargs, **{name: _unwrap(kwargs.get(name)) for name in ("pipeline", "staging")}}


def kind_of(task: Mapping[str, Any]) -> str | None:
    """Returns the kind of a task: ``"process"``, ``"batch"``, ``"spark"``, ``"ack"``, or ``"run"``
    (all in one); ``None`` for tasks of other operators.

    Users' subclasses of our operators live in other modules, so each operator marks its kind in the
    pipeline's reference.

    :param task: From :func:`arguments_of`.
    """
    reference = task.get("pipeline")
    mark = reference.get("task") if isinstance(reference, Mapping) else None
    if mark in _KINDS.values():
        return str(mark)
    # Airflow truncates long arguments to text, which loses the mark.
    return _KINDS.get(str(task.get("_task_module")))


def _unwrap(value: Any) -> Any:
    """Returns a serialized value without Airflow's type markers."""
    if isinstance(value, Mapping):
        if Encoding.VAR in value and Encoding.TYPE in value:
            return _unwrap(value[Encoding.VAR])
        return {str(key): _unwrap(item) for key, item in value.items()}
    return [_unwrap(item) for item in value] if isinstance(value, list) else value


# -- Airflow's database ----------------------------------------------------------------------------

#: Pipelines by the serialized Dag's row id and hash: each Dag version is read once.
_READ: dict[tuple[Any, str], list[Declared]] = {}


def declared_pipelines(dag_ids: Collection[str] | None = None) -> list[Declared]:
    """Returns the current pipelines of these Dags; of all Dags by default.

    Only Dags that were serialized since the last call are loaded.
    """
    newest = (
        select(DagVersion.dag_id, func.max(DagVersion.version_number).label("number"))
        .join(SerializedDagModel, SerializedDagModel.dag_version_id == DagVersion.id)
        .group_by(DagVersion.dag_id)
        .subquery()
    )
    rows = (
        select(
            SerializedDagModel.id,
            SerializedDagModel.dag_hash,
            SerializedDagModel.dag_id,
            DagModel.is_paused,
        )
        .join(DagVersion, SerializedDagModel.dag_version_id == DagVersion.id)
        .join(
            newest,
            (DagVersion.dag_id == newest.c.dag_id) & (DagVersion.version_number == newest.c.number),
        )
        .join(DagModel, DagModel.dag_id == SerializedDagModel.dag_id)
        .where(DagModel.is_stale.is_(False))
        .order_by(SerializedDagModel.dag_id)
    )
    pipelines: list[Declared] = []
    with create_session() as session:
        for row_id, dag_hash, dag_id, paused in session.execute(rows).all():
            if dag_ids is None or dag_id in dag_ids:
                of_dag = _load_pipelines(session, row_id, dag_hash, dag_id)
                pipelines += (replace(pipeline, paused=bool(paused)) for pipeline in of_dag)
    return pipelines


def _load_pipelines(session: Any, row_id: Any, dag_hash: str, dag_id: str) -> list[Declared]:
    key = (row_id, dag_hash)
    if key not in _READ:
        row = session.get(SerializedDagModel, row_id)
        for old in [known for known in _READ if known[0] == row_id]:
            del _READ[old]
        _READ[key] = [] if row is None or row.data is None else declared_in(dag_id, row.data)
    return _READ[key]


# -- runs ------------------------------------------------------------------------------------------

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
        tasks = self.of_kind("batch")
        named = [task for task in tasks if f".{task.task_id}".endswith(f".batch.{batcher}")]
        candidates = named or (tasks if len(tasks) == 1 else [])
        return candidates[0] if candidates else None

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
        return RunTasks(state=str(state), pipelines=_load_run_pipelines(session, dag_id, run_id))


def _load_run_pipelines(session: Session, dag_id: str, run_id: str) -> list[PipelineTasks]:
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
