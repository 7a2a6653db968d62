"""The pipelines that Dags declare, by what Airflow has stored of the Dags: nobody's code is loaded.

Each task of a pipeline carries its reference, the class's path and the overrides, and what was
known of the pipeline when the Dag was parsed: its name, broker, producers and batchers.  Of a class
that was given as text nothing was known then; such a pipeline goes by its class's name, unless an
override gives another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.serialized_dag import SerializedDagModel
from airflow.serialization.enums import Encoding
from airflow.utils.session import create_session
from sqlalchemy import func, select

from airflow_broadway.runs.backlog.reports import PipelineKey

#: The modules of our operators, and what their tasks do.
_KINDS: Final = {
    "airflow_broadway.operators.process": "process",
    "airflow_broadway.operators.batch": "batch",
    "airflow_broadway.operators.spark_submit": "spark",
    "airflow_broadway.operators.run": "run",
    "airflow_broadway.sensors.ack": "ack",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A pipeline of a Dag.

    :param path: The path of its class.
    :param broker: The short name of its broker's kind; ``None`` where that was not known.
    :param producers: How many tasks receive; ``None``: not known.
    :param batchers: The engine of each; ``None``: not known.
    :param staging: The staging root of its own; ``None``: that of Airflow's configuration.
    :param paused: Whether the Dag is.
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
        """What its last report is found by."""
        return PipelineKey(self.name, self.dag_id)


def declared_in(dag_id: str, dag: Mapping[str, Any]) -> list[Declared]:
    """The pipelines of a stored Dag, in the order of its tasks; one for each name.

    :param dag: What Airflow's serialization made of the Dag.
    """
    found: dict[str, Declared] = {}
    for stored in dag["dag"].get("tasks", ()):
        task = arguments_of(stored)
        if kind_of(task) in ("process", "run"):
            each = _declared(dag_id, task)
            if each is not None:
                found.setdefault(each.name, each)
    return list(found.values())


def arguments_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a stored Dag says of a task: a mapped one has its arguments apart."""
    task = stored.get(Encoding.VAR, stored)
    apart = task.get("partial_kwargs") or {}
    given = {**apart.get(Encoding.VAR, apart), **task}
    return {**given, **{name: _plain(given.get(name)) for name in ("pipeline", "staging")}}


def kind_of(task: Mapping[str, Any]) -> str | None:
    """What a task does for a pipeline: ``"process"``, ``"batch"``, ``"spark"``, ``"ack"``, or
    ``"run"``, all in one; ``None`` if it is none of ours.

    Its operator's class does not tell: people have subclasses in modules of their own.  So each
    operator of ours leaves a mark in its reference of the pipeline.

    :param task: From :func:`arguments_of`.
    """
    reference = task.get("pipeline")
    mark = reference.get("task") if isinstance(reference, Mapping) else None
    if mark in _KINDS.values():
        return str(mark)
    # Airflow stores arguments that are too long as cut text, without the mark.
    return _KINDS.get(str(task.get("_task_module")))


def _declared(dag_id: str, given: Mapping[str, Any]) -> Declared | None:
    reference = given.get("pipeline")
    if not isinstance(reference, Mapping) or not isinstance(reference.get("class"), str):
        return None
    options = reference.get("options") or {}
    about = reference.get("about") or {}
    named = options.get("name") or reference["class"].rpartition(":")[2].rpartition(".")[2]
    producers = about.get("producers")
    staging = given.get("staging")
    return Declared(
        dag_id=dag_id,
        name=str(about.get("name", named)),
        path=reference["class"],
        broker=about.get("broker"),
        producers=producers if isinstance(producers, int) else None,
        batchers=about.get("batchers"),
        staging=staging if isinstance(staging, str) else None,
    )


def _plain(value: Any) -> Any:
    """A stored value without the marks of Airflow's serialization."""
    if isinstance(value, Mapping):
        if Encoding.VAR in value and Encoding.TYPE in value:
            return _plain(value[Encoding.VAR])
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


# -- Airflow's database ----------------------------------------------------------------------------

#: The pipelines of each stored Dag, by the row's id and the Dag's hash: a Dag is read once.
_READ: dict[tuple[Any, str], list[Declared]] = {}


def declared_pipelines(dag_ids: Collection[str] | None = None) -> list[Declared]:
    """The pipelines of these Dags, as they are now; of all Dags, unless some are named.

    Only what was stored since the last call is read whole.
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
    found: list[Declared] = []
    with create_session() as session:
        for row_id, dag_hash, dag_id, paused in session.execute(rows).all():
            if dag_ids is None or dag_id in dag_ids:
                of_dag = _read(session, row_id, dag_hash, dag_id)
                found += (replace(each, paused=bool(paused)) for each in of_dag)
    return found


def _read(session: Any, row_id: Any, dag_hash: str, dag_id: str) -> list[Declared]:
    key = (row_id, dag_hash)
    if key not in _READ:
        row = session.get(SerializedDagModel, row_id)
        for old in [each for each in _READ if each[0] == row_id]:
            del _READ[old]
        _READ[key] = [] if row is None or row.data is None else declared_in(dag_id, row.data)
    return _READ[key]
