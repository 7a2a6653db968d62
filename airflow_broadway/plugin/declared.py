"""Pipelines declared by Dags, read from Airflow's serialized Dags: no user code is imported.

Each task of a pipeline carries its reference: the path of the class, the overrides, and the
attributes known when the Dag was parsed (name, broker, producers and batchers).  A class referenced
as text has no attributes; such a pipeline is named after its class, unless overridden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.serialized_dag import SerializedDagModel
from airflow.serialization.enums import Encoding
from airflow.utils.session import create_session
from sqlalchemy import func, select

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
