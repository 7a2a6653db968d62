"""Executes tasks of one run without a scheduler or a metadata database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from airflow.providers.common.compat.sdk import AirflowSkipException
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import AirflowRescheduleException

DAG_ID = "conformance"


class Tasks:
    """A run: calls the operators' ``execute`` with a simulated context."""

    def __init__(self, run_id: str = "manual__1") -> None:
        self.run_id = run_id
        #: The states of the tasks, for the ack sensor.
        self.states: dict[str, str] = {}
        #: The results of successful tasks.
        self.returned: dict[str, Any] = {}
        #: The tasks of the DAG.
        self.task_ids: list[str] = []

    def execute(self, operator: Any, map_index: int = -1) -> Any:
        """Executes a task; returns its result, ``None`` if it was skipped or deferred."""
        name = operator.task_id if map_index < 0 else f"{operator.task_id}_{map_index}"
        self.states[name] = "running"
        try:
            returned = operator.execute(
                self._context(operator, map_index), **_task_runner_marker(operator)
            )
        except AirflowSkipException:
            self.states[name] = "skipped"
            return None
        except AirflowRescheduleException:
            self.states[name] = "up_for_reschedule"
            return None
        except BaseException:
            self.states[name] = "failed"
            raise
        self.states[name] = "success"
        self.returned[name] = returned
        return returned

    def _context(self, operator: Any, map_index: int) -> Any:
        ti = SimpleNamespace(
            dag_id=DAG_ID,
            run_id=self.run_id,
            task_id=operator.task_id,
            map_index=map_index,
            try_number=1,
            id="00000000-0000-0000-0000-000000000000",
            # A sensor blocks its worker while its run is young; here no task runs concurrently.
            start_date=datetime.now(UTC) - timedelta(minutes=2),
            get_task_states=self._task_states,
            get_dr_count=lambda dag_id, run_ids, states: 1,
            get_first_reschedule_date=lambda context: None,
            xcom_push=lambda key, value: None,
            xcom_pull=self._returned_by,
        )
        dag_run = SimpleNamespace(
            run_type="manual",
            start_date=None,
            logical_date=None,
            data_interval_start=None,
            data_interval_end=None,
        )
        dag = SimpleNamespace(task_ids=self.task_ids, tasks=[])
        # No more messages will arrive.
        params = {"idle_seconds": 0.0}
        return {"ti": ti, "dag_run": dag_run, "dag": dag, "params": params}

    def _returned_by(self, task_ids: list[str]) -> list[Any]:
        return [
            value
            for name, value in self.returned.items()
            if name in task_ids or name.rpartition("_")[0] in task_ids
        ]

    def _task_states(self, dag_id: str, run_ids: list[str], task_ids: list[str]) -> dict[str, Any]:
        """Returns states like ``RuntimeTaskInstance``: names include map indices."""
        states: dict[str, str | None] = {}
        for task_id in task_ids:
            mapped: dict[str, str | None] = {
                name: state
                for name, state in self.states.items()
                if name == task_id or name.rpartition("_")[0] == task_id
            }
            states |= mapped or {task_id: None}  # not started
        return dict.fromkeys(run_ids, states)


def _task_runner_marker(operator: Any) -> dict[str, Any]:
    """Returns the argument with which Airflow's task runner calls ``execute``."""
    return {f"{type(operator).__name__}__sentinel": ExecutorSafeguard.sentinel_value}
