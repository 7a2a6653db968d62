"""The newest runs of Dags, from Airflow's database, to avoid listing large staging folders."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select


@dataclass(frozen=True, slots=True)
class LatestRun:
    """A run's id and its state in Airflow, such as ``"running"``."""

    run_id: str
    state: str

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self.state in ("success", "failed")


def latest_runs(dag_ids: Collection[str], most: int) -> dict[str, Sequence[LatestRun]]:
    """Returns the newest runs of each Dag, by creation, newest first."""
    runs: dict[str, Sequence[LatestRun]] = {}
    with create_session() as session:
        for dag_id in dag_ids:
            # One query per Dag, so that the index on dag_id limits the rows read.
            rows = session.execute(
                select(DagRun.run_id, DagRun.state)
                .where(DagRun.dag_id == dag_id)
                .order_by(DagRun.id.desc())
                .limit(most)
            )
            runs[dag_id] = [LatestRun(run_id, str(state)) for run_id, state in rows]
    return runs
