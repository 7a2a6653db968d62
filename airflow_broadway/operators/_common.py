"""What all operators share: the run they work in, its staging folder, and Airflow's connections."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowNotFoundException,
    BaseHook,
    ObjectStoragePath,
    conf,
)

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, OptionsError, StagingError
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import import_class, is_dag_file, load_ref, make_ref

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.staging.run_folder import StagedRun
    from airflow_broadway.staging.store import Store


#: Seconds that a task which is told to stop takes at most to finish what it is at, whatever the
#: pipeline's ``shutdown``: Airflow kills it after five, and what is done must be stored by then.
MAX_SHUTDOWN = 2.0


class AirflowConnections:
    """Airflow's connections, each looked up once.

    Once, because lease keepers use them from threads, and a task's channel to Airflow is for its
    main thread.
    """

    def __init__(self) -> None:
        self._known: dict[str, Connection] = {}

    def get(self, conn_id: str) -> Connection:
        if conn_id not in self._known:
            self._known[conn_id] = self._look_up(conn_id)
        return self._known[conn_id]

    @staticmethod
    def _look_up(conn_id: str) -> Connection:
        try:
            found = BaseHook.get_connection(conn_id)
        except AirflowNotFoundException:
            raise ConnectionMissing(
                f"the Airflow connection {conn_id!r} is not defined; add it under Admin →"
                f" Connections, or set the variable AIRFLOW_CONN_{conn_id.upper()}"
            ) from None
        return Connection(
            conn_id=conn_id,
            conn_type=found.conn_type or "",
            host=found.host or "",
            port=found.port,
            login=found.login or "",
            password=found.password or "",
            schema=found.schema or "",
            extra=found.extra_dejson,
        )


def pipeline_ref(pipeline: object) -> dict[str, Any]:
    """The reference an operator stores, checked as far as parsing may: the class is not imported if
    it was given as text.

    :raises OptionsError: Naming the option and the rule.
    """
    ref = make_ref(pipeline)
    known = declared(ref)
    if known is not None:
        known.check_callbacks(known.batchers)
    return ref


def declared(ref: Mapping[str, Any]) -> Pipeline | None:
    """The pipeline of a reference while a Dag is parsed; ``None`` if its module is not loaded yet.

    Loading it then would be work at import.
    """
    import sys

    path = str(ref["class"])
    if is_dag_file(path) or path.partition(":")[0] in sys.modules:
        return import_class(path)(**ref["options"])
    return None


def check_engine(ref: Mapping[str, Any]) -> None:
    """Refuse a Spark batcher of a class that no Spark driver could import.

    :raises OptionsError: Saying where to move the class.
    """
    path = str(ref["class"])
    if not is_dag_file(path):
        return
    pipeline = declared(ref)
    spark = [n for n, b in (pipeline.batchers if pipeline else {}).items() if b.engine == "spark"]
    if spark:
        name = path.partition(":")[2]
        raise OptionsError(
            f"batchers.{spark[0]}.engine",
            f"'python' for a pipeline of a Dag file, which Spark cannot import: move the class"
            f" {name} to a module of its own beside the Dag file, such as"
            f" {name.lower()}_pipeline.py, and import it from there",
            "spark",
        )


def run_info(context: Context) -> RunInfo:
    """What callbacks may know about the run."""
    dag_run = context["dag_run"]
    return RunInfo(
        dag_id=context["ti"].dag_id,
        run_id=context["ti"].run_id,
        logical_date=dag_run.logical_date,
        data_interval_start=dag_run.data_interval_start,
        data_interval_end=dag_run.data_interval_end,
        params=dict(context["params"]),
        try_number=context["ti"].try_number,
    )


def load_pipeline(ref: Mapping[str, Any], context: Context) -> Pipeline:
    """The pipeline of a rendered reference, in this run.

    :raises PipelineError: If it cannot be imported.
    :raises OptionsError: If an option, once rendered, breaks its rule.
    """
    return load_ref(ref, run_info(context))


def staging_root(staging: str | None) -> str:
    """The staging root's URI: the operator's, else ``[broadway] staging``, else a folder of
    AIRFLOW_HOME.
    """
    if staging:
        return staging
    home = os.environ.get("AIRFLOW_HOME", os.path.expanduser("~/airflow"))
    return str(conf.get("broadway", "staging", fallback=f"file://{home}/broadway"))


def open_store(staging: str | None) -> Store:
    """The staging root, through Airflow's object storage: ``s3://conn_id@bucket/…`` names the
    connection.
    """
    from airflow_broadway.staging.store import Store

    uri = staging_root(staging)
    if "://" not in uri:
        raise StagingError(
            f"the staging root {uri!r} is no URI; set [broadway] staging to one such as"
            " 'file:///data/broadway' or 's3://aws_default@bucket/broadway'"
        )
    try:
        path = ObjectStoragePath(uri)
        return Store(path.fs, path.path, uri)
    except (ValueError, ImportError) as error:
        raise StagingError(
            f"the staging root {uri!r} cannot be opened: {error}; set [broadway] staging to a URI"
            " that fsspec has a client for, such as 'file:///data/broadway'"
        ) from error


def open_run(context: Context, staging: str | None, pipeline: str) -> StagedRun:
    """The folder of this run."""
    from airflow_broadway.staging.run_folder import StagedRun

    ti = context["ti"]
    return StagedRun(open_store(staging), pipeline=pipeline, dag_id=ti.dag_id, run_id=ti.run_id)


def task_name(ti: Any) -> str:
    """The name in the staging folder of a task instance, by which a later try fences it off.

    Different for different tasks, or one would fence the other off: no task id has a ``!``.
    """
    index = getattr(ti, "map_index", -1)
    return re.sub(r"[^A-Za-z0-9_.-]", "_", ti.task_id) + (f"!{index}" if index >= 0 else "")


def owner_of(context: Context) -> dict[str, Any]:
    """Who holds a lease, for people and sweeps."""
    ti = context["ti"]
    return {
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": ti.map_index,
        "try_number": ti.try_number,
    }


def producer_env(
    pipeline: Pipeline,
    *,
    generation: str,
    owner: Mapping[str, Any],
    index: int = 0,
    store: Store | None = None,
    connections: AirflowConnections | None = None,
    clock: Clock | None = None,
) -> ProducerEnv:
    """What a producer is opened in."""
    return ProducerEnv(
        pipeline=pipeline.name,
        generation=generation,
        owner=dict(owner),
        index=index,
        clock=clock or SystemClock(),
        connections=connections or AirflowConnections(),
        staging=None if store is None else f"{store.uri.rstrip('/')}/{pipeline.name}",
    )


def references(rendered: Any) -> Iterator[Mapping[str, Any]]:
    """The references in whatever a template renders: one, a list, a mapped task's outputs.

    Those of tasks that pushed none are left out.
    """
    if isinstance(rendered, Mapping):
        if rendered:
            yield rendered
    elif rendered is not None and not isinstance(rendered, str):
        # A slice gets a mapped task's outputs at once; going through them asks for each, and for
        # one after the last, which Airflow logs as an error.
        for each in rendered[:] if isinstance(rendered, Sequence) else rendered:
            yield from references(each)
