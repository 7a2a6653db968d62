"""Cases as batches of one Spark application.

Every case has a process task of its own and batchers that are named after it; their plans are the
work of one application, whose class has the batchers of all.  Its ``handle_batch`` collects the
rows, follows the case's rules, and says in Spark's terms what they came to.
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
from tests.conformance.pipelines import apply_callback, batch_seen
from tests.conformance.staged import StagedCase, importable
from tests.conformance.tasks import DAG_ID, Tasks
from tests.conformance.ways import watched

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "Conformance"


class SparkCase(StagedCase):
    """One case; its batches run in the application."""

    def __init__(self, case: Case, folder: Path, tasks: Tasks, prefix: str) -> None:
        super().__init__(spark_case(case), folder, tasks, engine="spark", name=NAME, prefix=prefix)
        if not case["given"].get("batchers"):
            self.custody.only = "default"
            self.seen.batches = None
        self.seen.telemetry = None
        ops = {op["op"] for op in operations(self.case["given"].get("handle_batch") or {})}
        if "set_status_error" in ops:  # a row fails, in no other way than any
            self.seen.handle_failed_status = None

    def handle_batch(self, batcher: str, rows: DataFrame, info: BatchInfo) -> Any:
        """Follows the case's rules; returns what Spark knows for it."""
        messages = [
            Message(json.loads(row.data), message_id=row.message_id)
            for row in rows.orderBy("position").collect()
        ]
        name = batcher.removeprefix(self.prefix)
        if self.seen.batches is not None:
            batch = batch_seen(name, [message.data for message in messages], info)
            self.seen.batches.append({**batch, "batch_processor": ANY})
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
        """Those that failed, by their reasons; ``None`` without failures."""
        reasons: dict[str, list[str]] = {}
        for message in messages:
            reasons.setdefault(str(message.status.reason), []).append(message.message_id)
        parts = [
            failed(rows.where(rows.message_id.isin(ids)), reason=reason)
            for reason, ids in reasons.items()
        ]
        return parts or None


class Application:
    """One run: its process tasks, its one Spark application, its ack sensors.

    :param cases: Those to run; none that :func:`limits.not_by_spark` has something against.
    """

    def __init__(self, cases: Sequence[Case], folder: Path, spark: SparkSession) -> None:
        self._tasks = Tasks()
        self._made: dict[str, SparkCase] = {}
        self._found: dict[str, Observed | Exception] = {}
        plans: list[str] = []
        for case in cases:
            try:
                plans += self._stage(case, folder)
            except Exception as error:  # of this case alone
                self._found[_key(case)] = error
        run = StagedRun(
            Store.open(f"file://{folder}/staging"),
            pipeline=NAME,
            dag_id=DAG_ID,
            run_id=self._tasks.run_id,
        )
        self.code = self._run(spark, run, plans)
        for key, made in self._made.items():
            try:
                self._found[key] = made.acknowledge()
            except Exception as error:
                self._found[key] = error

    def seen(self, case: Case) -> Observed:
        """Returns the observations of a case."""
        result = self._found[_key(case)]
        if isinstance(result, Exception):
            raise result
        assert self.code == 0, "not every batch has an outcome"
        return result

    def _stage(self, case: Case, folder: Path) -> list[str]:
        """The process and batch tasks of a case; returns its plans."""
        staged = SparkCase(case, folder, self._tasks, f"{_key(case)}.")
        with watched(case, staged.seen):
            references = staged.batch(staged.process())
        self._made[_key(case)] = staged
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
        logger, codes = logging.getLogger("airflow_broadway"), _Codes(self._made)
        logger.addHandler(codes)
        try:
            return run_work(ClassicSessions(spark), run.spark_uri(), files, work)
        finally:
            logger.removeHandler(codes)

    def _class(self) -> type[Broadway]:
        """The class with the batchers of all cases."""
        cases = self._made

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
                for made in cases.values()
                for name, batcher in made.pipeline.batchers.items()
            },
            "handle_batch": handle_batch,
            "handle_failed": handle_failed,
        }
        return importable(type("All", (Broadway,), attributes), "All")


class _Codes(logging.Handler):
    """Gives each case the codes of the errors in its batchers' threads."""

    def __init__(self, cases: dict[str, SparkCase]) -> None:
        super().__init__(logging.ERROR)
        self._cases = cases

    def emit(self, record: logging.LogRecord) -> None:
        code = getattr(record, "code", None)
        case = self._cases.get(str(record.threadName).partition(".")[0])
        if code is not None and case is not None and case.seen.errors is not None:
            case.seen.errors.append(code)


def _key(case: Case) -> str:
    """A case's id, as part of the names of tasks and batchers."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", str(case["id"]))
