"""The newest runs of Dags, as Airflow knows them: so no folder with thousands of runs is listed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select


@dataclass(frozen=True, slots=True)
class LatestRun:
    """A run by its id and Airflow's state of it, such as ``"running"``."""

    run_id: str
    state: str

    @property
    def is_over(self) -> bool:
        """Whether Airflow does no more for it."""
        return self.state in ("success", "failed")


def latest_runs(dag_ids: Collection[str], most: int) -> dict[str, Sequence[LatestRun]]:
    """The newest runs of each Dag, by when they were made, the newest first."""
    found: dict[str, Sequence[LatestRun]] = {}
    with create_session() as session:
        for dag_id in dag_ids:
            # One by one: the index on dag_id then gives the last ones, whatever their number.
            rows = session.execute(
                select(DagRun.run_id, DagRun.state)
                .where(DagRun.dag_id == dag_id)
                .order_by(DagRun.id.desc())
                .limit(most)
            )
            found[dag_id] = [LatestRun(run_id, str(state)) for run_id, state in rows]
    return found
