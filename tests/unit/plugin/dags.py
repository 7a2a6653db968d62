"""Dags in Airflow's database, as its Dag processor would store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol

from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagrun import DagRun
from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import LazyDeserializedDAG
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from sqlalchemy import delete

_BUNDLE = "unit"


class Store(Protocol):
    """Stores a Dag, or another version of it."""

    def __call__(self, dag: DAG, *, is_paused: bool = False, is_stale: bool = False) -> None: ...


def _store(dag: DAG, *, is_paused: bool = False, is_stale: bool = False) -> None:
    with create_session() as session:
        session.merge(DagBundleModel(name=_BUNDLE))
        session.flush()
        session.merge(
            DagModel(
                dag_id=dag.dag_id,
                bundle_name=_BUNDLE,
                fileloc="unit.py",
                is_stale=is_stale,
                is_paused=is_paused,
                timetable_summary="",
            )
        )
    SerializedDagModel.write_dag(LazyDeserializedDAG.from_dag(dag), bundle_name=_BUNDLE)


def add_runs(dag_id: str, runs: Mapping[str, str]) -> None:
    """Runs of a Dag by their ids, with their states, the oldest first."""
    with create_session() as session:
        for run_id, state in runs.items():
            session.add(
                DagRun(
                    dag_id=dag_id,
                    run_id=run_id,
                    run_type="manual",
                    state=DagRunState(state),
                    run_after=datetime.now(UTC),
                )
            )
            session.flush()


@contextmanager
def stored_dags(*dags: DAG) -> Iterator[Store]:
    """Dags that Airflow knows, while this lasts."""
    stored: set[str] = set()

    def store(dag: DAG, *, is_paused: bool = False, is_stale: bool = False) -> None:
        stored.add(dag.dag_id)
        _store(dag, is_paused=is_paused, is_stale=is_stale)

    try:
        for dag in dags:
            store(dag)
        yield store
    finally:
        with create_session() as session:
            session.execute(delete(DagRun).where(DagRun.dag_id.in_(stored)))
            session.execute(delete(DagModel).where(DagModel.dag_id.in_(stored)))
            # A bundle without Dags would cause a warning in the next test.
            session.execute(delete(DagBundleModel).where(DagBundleModel.name == _BUNDLE))
