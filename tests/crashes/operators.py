"""Subjects whose tasks are Airflow's operators and sensor, over the embedded queue.

Calls ``execute`` with a simulated context and XCom; XCom pushes are points.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from airflow_broadway.core.model.connections import VARIABLE
from airflow_broadway.core.reference import import_class
from airflow_broadway.testing.crashes.spark import submit, uses_spark
from airflow_broadway.testing.crashes.subject import Embedded
from airflow_broadway.testing.crashes.tasks import DAG, Attempt
from tests.crashes.subjects import MakeSubject


@contextmanager
def open_subjects() -> Iterator[MakeSubject]:
    """Yields a function that creates subjects whose tasks are operators."""
    with tempfile.TemporaryDirectory(prefix="crashes-airflow-") as home:
        variables = {
            "AIRFLOW_HOME": home,
            "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            # Loads Airflow once for all forks.
            import airflow_broadway.operators.run
            import airflow_broadway.operators.spark_submit
            import airflow_broadway.sensors.ack  # noqa: F401

            yield _OperatorSubject
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


class _OperatorSubject(Embedded):
    """A pipeline over the embedded queue."""

    def execute(self, attempt: Attempt) -> Any:
        from airflow.sdk.exceptions import (
            AirflowException,
            AirflowFailException,
            AirflowSkipException,
            TaskDeferred,
        )

        for name, connection in json.loads(os.environ.get(VARIABLE, "{}")).items():
            del connection["conn_id"]
            text = json.dumps({"conn_type": "generic", **connection})
            os.environ[f"AIRFLOW_CONN_{name.upper()}"] = text
        configured = self.pipeline(**self.overrides())
        for name in self.overrides():  # not JSON, so no operator arguments
            setattr(self.pipeline, name, getattr(configured, name))
        ti = _StubTaskInstance(attempt, attempt.map_index(self.pipeline()))
        try:
            returned = self._operator(attempt).execute(_context(ti, self._watched()))
        except TaskDeferred:  # the sensor pokes again
            return None
        except (AirflowSkipException, AirflowFailException) as error:
            # No retry: later tasks get the pushed value.
            print(f"{type(error).__name__}: {error}", flush=True)
            if "does not balance" in str(error):
                raise
            return ti.pushed.get("return_value", {"ended": str(error)})
        except AirflowException as error:
            if "no outcome" not in str(error):
                raise
            return {"outcomes": {"without_outcome": str(error)}}
        ti.xcom_push("return_value", returned)
        return returned

    def _operator(self, attempt: Attempt) -> Any:
        """Creates the operator of a task."""
        from airflow_broadway.operators.batch import BroadwayBatcherOperator
        from airflow_broadway.operators.process import BroadwayProcessorOperator
        from airflow_broadway.operators.run import BroadwayRunOperator
        from airflow_broadway.sensors.ack import BroadwayAckSensor

        kwargs: dict[str, Any] = {
            "task_id": attempt.task_id,
            "pipeline": self.pipeline,
            "staging": self.staging,
        }
        pulls = {**kwargs, "max_seconds": 60.0, "idle_seconds": 0.0}
        if attempt.task_id == "process":
            return BroadwayProcessorOperator(**pulls, producer_index=attempt.index)
        if attempt.task_id == "run":
            return BroadwayRunOperator(**pulls, fail_when="never")
        if attempt.task_id in ("poke", "ack"):
            return BroadwayAckSensor(
                **{**kwargs, "task_id": "ack"},
                watch=self._watched(),
                hold_failed=self.hold_failed,
                fail_when="never",
                deferrable=True,
            )
        if attempt.driver is not None:
            return _submit_operator(attempt, **kwargs, batches=attempt.returned_by("batch."))
        return BroadwayBatcherOperator(
            **kwargs,
            batcher=attempt.task_id.removeprefix("batch."),
            processed=attempt.returned_by("process"),
        )

    def _watched(self) -> list[str]:
        spark = ["spark"] if uses_spark(self.pipeline) else []
        return ["process", *(f"batch.{name}" for name in self.pipeline.batchers), *spark]


def _submit_operator(attempt: Attempt, **kwargs: Any) -> Any:
    """Creates the operator that submits to Spark; a forked driver replaces ``spark-submit``.

    An execution has one driver: another one needs the next try.
    """
    from airflow.sdk.exceptions import AirflowException

    from airflow_broadway.adapters.host import Host
    from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator

    class ForkedSubmit(BroadwaySparkSubmitOperator):
        submitted = False

        def _choose_options(self, context: Any) -> Any:
            """Does nothing: there is no connection."""

        def _submit(self, context: Any, run: Any, batches: Any) -> Exception | None:
            if self.submitted:
                raise AirflowException("an execution has only one driver")
            self.submitted = True
            assert attempt.driver is not None
            pipeline = import_class(self.pipeline["class"])()
            arguments = run, pipeline, Host(context).task, attempt.driver, attempt.interceptor
            error = submit(batches, *arguments)
            return AirflowException(error) if error else None

    return ForkedSubmit(**kwargs, check_pipeline=False)


class _StubTaskInstance:
    """A stub of Airflow's task instance with the attributes that operators use."""

    def __init__(self, attempt: Attempt, map_index: int) -> None:
        self._attempt = attempt
        self.dag_id, self.run_id = DAG, attempt.run_id
        self.task_id = "ack" if attempt.task_id == "poke" else attempt.task_id
        self.map_index = map_index
        self.try_number = attempt.try_number
        self.id = f"{attempt.run_id}-{attempt.task}"
        self.start_date: Any = None
        self.pushed: dict[str, Any] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        def push() -> None:
            self.pushed[key] = value

        self._attempt.interceptor.call("xcom", key, push)

    def xcom_pull(self, task_ids: Sequence[str]) -> list[Any]:
        """Returns the last return values of the watched tasks."""
        returned = self._attempt.returned.items()
        return [value for task, value in returned if task.partition("!")[0] in task_ids]

    def get_first_reschedule_date(self, context: Any) -> None:
        return None

    def get_dr_count(self, dag_id: str, run_ids: Sequence[str], states: Sequence[str]) -> int:
        return sum(not self._attempt.is_over(run_id) for run_id in run_ids)

    def get_task_states(
        self, dag_id: str, run_ids: Sequence[str], task_ids: Sequence[str]
    ) -> dict[str, dict[str, str]]:
        """Returns the states of tasks by the attempt; all have ended at the last poke."""
        attempt = self._attempt
        is_last = attempt.task_id == "ack"
        states = {}
        for task in attempt.tasks:
            task_id, _, index = task.partition("!")
            if task_id in task_ids:
                done = is_last or task in attempt.returned
                failed = "failed" if task in attempt.failed else "success"
                name = f"{task_id}_{index}" if index else task_id
                states[name] = failed if done else "running"
        return dict.fromkeys(run_ids, states)


def _context(ti: _StubTaskInstance, watched: Sequence[str]) -> Any:
    dag_run = SimpleNamespace(
        run_id=ti.run_id,
        run_type="manual",
        logical_date=None,
        data_interval_start=None,
        data_interval_end=None,
        start_date=None,
    )
    params: Mapping[str, Any] = {}
    dag = SimpleNamespace(task_ids=[*watched, "ack"], tasks=[])
    return {"ti": ti, "dag_run": dag_run, "dag": dag, "params": params}
