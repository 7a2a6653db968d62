"""Runs cases as batches of one Spark application.

Every case has its own process task and batchers.  One application handles the plans of all cases;
its class has all batchers.  ``handle_batch`` collects the rows, applies the case's rules, and
returns the results as Spark batchers do.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_broadway import BatchInfo, Broadway, Message
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import make_ref
from airflow_broadway.spark import failed
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.files import open_files
from airflow_broadway.spark.session import ClassicSessions
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from tests.conformance.feed import CaseProducer
from tests.conformance.limits import operations, spark_case
from tests.conformance.observed import ANY, Case, Observed
from tests.conformance.pipelines import apply_callback, describe_batch_call
from tests.conformance.runners import record_telemetry
from tests.conformance.staged import StagedCase, make_importable
from tests.conformance.tasks import DAG_ID, Tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "Conformance"


class SparkCase(StagedCase):
    """A case whose batches run in the Spark application."""

    def __init__(self, case: Case, folder: Path, tasks: Tasks, prefix: str) -> None:
        super().__init__(spark_case(case), folder, tasks, engine="spark", name=NAME, prefix=prefix)
        if not case["given"].get("batchers"):
            self.custody.only = "default"
            self.observed.batches = None
        self.observed.telemetry = None
        ops = {op["op"] for op in operations(self.case["given"].get("handle_batch") or {})}
        if "set_status_error" in ops:  # a row fails, in no other way than any
            self.observed.handle_failed_status = None

    def handle_batch(self, batcher: str, rows: DataFrame, info: BatchInfo) -> Any:
        """Applies the case's rules; returns the equivalent result for Spark."""
        messages = [
            Message(json.loads(row.data), message_id=row.message_id)
            for row in rows.orderBy("position").collect()
        ]
        name = batcher.removeprefix(self.prefix)
        if self.observed.batches is not None:
            batch = describe_batch_call(name, [message.data for message in messages], info)
            self.observed.batches.append({**batch, "batch_processor": ANY})
        returned = apply_callback(self.case["given"].get("handle_batch") or {}, messages)
        if not isinstance(returned, list):
            return returned
        strange = [message for message in returned if not isinstance(message, Message)]
        if strange:
            return strange
        if len(returned) < len(messages):
            outcomes = [
                (message.message_id, message.ok, str(message.status.reason)) for message in returned
            ]
            schema = "message_id string, ok boolean, reason string"
            return rows.sparkSession.createDataFrame(outcomes, schema)
        return self._failed(rows, [message for message in returned if not message.ok])

    @staticmethod
    def _failed(rows: DataFrame, messages: list[Message]) -> Any:
        """Returns the failed messages by reason; ``None`` without failures."""
        reasons: dict[str, list[str]] = {}
        for message in messages:
            reasons.setdefault(str(message.status.reason), []).append(message.message_id)
        parts = [
            failed(rows.where(rows.message_id.isin(ids)), reason=reason)
            for reason, ids in reasons.items()
        ]
        return parts or None


class Application:
    """A run: the process tasks and ack sensors of the cases, and one Spark application.

    :param cases: The cases to run; :func:`limits.not_by_spark` must be empty for each.
    """

    def __init__(self, cases: Sequence[Case], folder: Path, spark: SparkSession) -> None:
        self._tasks = Tasks()
        self._staged_cases: dict[str, SparkCase] = {}
        self._results: dict[str, Observed | Exception] = {}
        plans: list[str] = []
        for case in cases:
            try:
                plans += self._stage(case, folder)
            except Exception as error:  # fails this case only
                self._results[_key(case)] = error
        run = StagedRun(
            Store.open(f"file://{folder}/staging"),
            pipeline=NAME,
            dag_id=DAG_ID,
            run_id=self._tasks.run_id,
        )
        self.code = self._run(spark, run, plans)
        for key, staged_case in self._staged_cases.items():
            try:
                self._results[key] = staged_case.acknowledge()
            except Exception as error:
                self._results[key] = error

    def observed(self, case: Case) -> Observed:
        """Returns the observations of a case."""
        result = self._results[_key(case)]
        if isinstance(result, Exception):
            raise result
        assert self.code == 0, "not every batch has an outcome"
        return result

    def _stage(self, case: Case, folder: Path) -> list[str]:
        """Runs the process and batch tasks of a case; returns its plans."""
        staged = SparkCase(case, folder, self._tasks, f"{_key(case)}.")
        with record_telemetry(case, staged.observed):
            references = staged.batch(staged.process())
        self._staged_cases[_key(case)] = staged
        return [reference["plan"] for reference in references]

    def _run(self, spark: SparkSession, run: StagedRun, plans: list[str]) -> int:
        work = Work(
            name="handle_batches",
            try_number=1,
            pipeline=make_ref(self._class()()),
            run=RunInfo(dag_id=run.dag_id, run_id=run.run_id).to_json(),
            plans=plans,
        )
        files = open_files(run.spark_uri())
        files.create(paths.of_try(work.name, work.try_number), work.dumps())
        logger, codes = logging.getLogger("airflow_broadway"), _ErrorCodes(self._staged_cases)
        logger.addHandler(codes)
        try:
            return run_work(ClassicSessions(spark), run.spark_uri(), files, work)
        finally:
            logger.removeHandler(codes)

    def _class(self) -> type[Broadway]:
        """Returns the class with the batchers of all cases."""
        cases = self._staged_cases

        def of(batcher: str) -> SparkCase:
            return cases[batcher.partition(".")[0]]

        def handle_batch(
            self: Broadway, batcher: str, rows: DataFrame, info: BatchInfo, context: Any
        ) -> Any:
            return of(batcher).handle_batch(batcher, rows, info)

        def handle_failed(self: Broadway, messages: list[Message], context: Any) -> Any:
            pipeline = of(messages[0].batcher).pipeline
            return (
                pipeline.handle_failed(self, messages, context)
                if pipeline.defines("handle_failed")
                else messages
            )

        attributes = {
            "name": NAME,
            "producer": CaseProducer(queue="all", path="/nowhere", on_failure="dead_letter"),
            "batchers": {
                name: batcher
                for staged_case in cases.values()
                for name, batcher in staged_case.pipeline.batchers.items()
            },
            "handle_batch": handle_batch,
            "handle_failed": handle_failed,
        }
        return make_importable(type("All", (Broadway,), attributes), "All")


class _ErrorCodes(logging.Handler):
    """Collects error codes by case, from the names of the batchers' threads."""

    def __init__(self, cases: dict[str, SparkCase]) -> None:
        super().__init__(logging.ERROR)
        self._cases = cases

    def emit(self, record: logging.LogRecord) -> None:
        code = getattr(record, "code", None)
        case = self._cases.get(str(record.threadName).partition(".")[0])
        if code is not None and case is not None and case.observed.errors is not None:
            case.observed.errors.append(code)


def _key(case: Case) -> str:
    """Returns a case's id in a form for names of tasks and batchers."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", str(case["id"]))
