"""One batch: a session of its own, the callback, and the outcome that settles its messages.

What stands between a batch and a wrong outcome:

* the fence is checked before the callback, and again, freshly, before the outcome is written;
* what the callback raises fails the batch, unless Spark itself is gone or the application is being
  stopped: then nothing is recorded, and a retry runs the batch again under the same id;
* rows that cannot be read back are a matter of their batch alone: it fails without
  ``handle_failed``, which would get them, and if that cannot be either, it has no outcome, as one
  whose files are not there;
* many entries are written first, under a name of their own, few into the outcome, which is created
  exclusively: of two writers one wins, and the other's entries are read by nobody.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import BroadwayError, PipelineError
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch, plain_key
from airflow_broadway.core.formats.record_batch import BatchRecorder, Exceptions, OpenBatch
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Status
from airflow_broadway.core.stages.callbacks import PROTECTED, log_failure, status_of
from airflow_broadway.core.text import cut, many
from airflow_broadway.spark.entries import Counts, Judge
from airflow_broadway.spark.frame import BatchFrames
from airflow_broadway.spark.results import Failed, Outcomes, read
from airflow_broadway.spark.session import end_session, name_jobs, new_session, why_lost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_broadway.core.pipeline import Pipeline

__all__ = ["Application", "BatchRunner", "SparkLost", "Stopped", "Unreadable"]

log = logging.getLogger(__name__)

_BATCH = ("batch_processor.start", "batch_processor.stop", "batch_processor.exception")


class SparkLost(BroadwayError):
    """Spark is gone: what was running has no outcome."""


class Stopped(BroadwayError):
    """The application is being stopped: what was running has no outcome."""


class Unreadable(BroadwayError):
    """Messages of one batch cannot be read back: it has no outcome, and others go on."""


class _CallbackError(Exception):
    """Carries what the evaluation of a returned DataFrame raised through the writing of entries."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True)
class Application:
    """What all batches of one application share.

    :param uri: The run's folder, for Spark's readers.
    :param stopping: Whether the application has been told to stop.
    """

    spark: SparkSession
    uri: str
    files: Files
    work: Work
    pipeline: Pipeline
    context: Any
    ownership: Ownership
    stopping: Callable[[], bool] = lambda: False
    application_id: str = ""
    host: str = field(default_factory=socket.gethostname)

    def check_alive(self, cause: BaseException | None = None) -> None:
        """Return while outcomes may be recorded.

        :raises Stopped: If the application has been told to stop.
        :raises SparkLost: If the JVM is gone, or the SparkContext stopped.
        """
        if self.stopping():
            raise Stopped("the application was stopped") from cause
        loss = why_lost(self.spark)
        if loss:
            raise SparkLost(loss) from cause


class BatchRunner:
    """Runs the batches of one plan; used from many threads."""

    def __init__(self, application: Application, plan: BatchPlan) -> None:
        self._app = application
        self._plan = plan
        self._frames = BatchFrames(application.uri, plan)
        work = application.work
        self._recorder = BatchRecorder(
            application.files,
            plan,
            application.ownership,
            writer=f"{work.name} try {work.try_number} on {application.host}",
            try_number=work.try_number,
            fresh=True,
            application_id=application.application_id,
        )
        about = application.pipeline, application.context, self._frames
        self._judge = Judge(*about)
        self._judge_without = Judge(*about, handle_failed=False)

    def run(self, planned: PlannedBatch, *, lane: int = 0) -> Outcome:
        """Handle one batch and record its outcome; returns the one that stands.

        :param lane: Which of the batcher's ``concurrency`` threads runs it, from 0.
        :raises LeaseLapsed: If the run no longer holds its messages, or a later try has begun.
        :raises SparkLost: If Spark is gone.
        :raises Stopped: If the application was told to stop.
        :raises Unreadable: If its files are not there, or what failed cannot be read back.
        """
        batch = self._recorder.begin(planned, plain_key(planned.batch_key))
        session = new_session(self._app.spark)
        try:
            return self._run(session, planned, batch, lane)
        finally:
            end_session(session)

    def finish(self) -> None:
        """Say that no further batch comes."""
        self._recorder.finish()

    def _run(
        self, session: SparkSession, planned: PlannedBatch, batch: OpenBatch, lane: int
    ) -> Outcome:
        name_jobs(
            session,
            planned.batch_id,
            f"{self._plan.pipeline} {self._plan.batcher} {planned.batch_id}",
            f"{self._plan.batcher}.{lane}",
        )
        found = self._call(session, planned, batch.info, lane)
        exceptions, counts, whole = self._keep(session, planned, found)
        if counts.unnamed:
            log.error(
                "%s.handle_batch received %s and returned outcomes of only %d; one without"
                " an outcome is not settled, and goes back to its broker when the run ends",
                type(self._app.pipeline).__name__,
                many(planned.size, "message"),
                planned.size - counts.unnamed,
                extra={"code": "handle_batch_count_mismatch"},
            )
        self._app.check_alive()
        return batch.record(
            successful=planned.size - counts.failed - counts.missing,
            failed=counts.failed,
            missing=counts.missing,
            exceptions=exceptions,
            error=whole.text if whole else "",
        )

    # ----------------------------------------------------------------------------------------------

    def _call(
        self, session: SparkSession, batch: PlannedBatch, info: BatchInfo, lane: int
    ) -> Failed | Outcomes | Status | None:
        """What ``handle_batch`` returned, checked; or the status of a batch that failed whole."""
        pipeline = self._app.pipeline
        messages = self._messages(session, batch)
        span = self._span(info, lane, messages)
        try:
            if not pipeline.defines("handle_batch"):
                raise PipelineError(
                    f"{type(pipeline).__name__} defines no handle_batch",
                    code="handle_batch_undefined",
                )
            found = read(
                pipeline.handle_batch(self._plan.batcher, messages, info, self._app.context)
            )
        except PROTECTED as error:
            # As in Broadway: a callback that raises fails its batch, and the span still stops.
            if span is not None:
                span.stop({**self._about(lane), "batch_info": info})
            self._app.check_alive(error)
            log_failure("handle_batch", pipeline, error, batch.size)
            return status_of(error)
        except BaseException as error:
            if span is not None:
                status = status_of(error)
                span.exception(status.kind, status.reason, status.stacktrace)
            raise
        if span is not None:
            span.stop({**self._about(lane), "batch_info": info})
        return found

    def _messages(self, session: SparkSession, batch: PlannedBatch) -> DataFrame:
        try:
            return self._frames.messages(session, batch)
        except Exception as error:  # Spark looks whether the files are there
            self._app.check_alive(error)
            raise _unreadable("messages", batch, error) from error

    def _keep(
        self, session: SparkSession, batch: PlannedBatch, found: Failed | Outcomes | Status | None
    ) -> tuple[Exceptions, Counts, Status | None]:
        """Keep the batch's exceptions.

        Returns them, their counts, and the status of a batch that failed whole.
        """
        whole = found if isinstance(found, Status) else None
        if whole is None:
            try:
                return *self._stream(session, batch, found, self._judge), None
            except _CallbackError as carried:
                # A frame is lazy: what was returned is computed, and may raise, only here.
                error = carried.error
                self._app.check_alive(error)
                log_failure("handle_batch", self._app.pipeline, error, batch.size)
                whole = status_of(error)
        try:
            return *self._stream(session, batch, whole, self._judge), whole
        except Unreadable as error:
            log.error("%s: they are settled without handle_failed", error)
            return *self._stream(session, batch, whole, self._judge_without), whole

    def _stream(
        self,
        session: SparkSession,
        batch: PlannedBatch,
        found: Failed | Outcomes | Status | None,
        judge: Judge,
    ) -> tuple[Exceptions, Counts]:
        counts = Counts()
        entries = judge.entries(session, batch, found, counts)
        own = not isinstance(found, Status)

        def lines() -> Iterator[str]:
            while True:
                try:
                    line = next(entries, None)
                except PROTECTED as error:
                    if own:
                        raise _CallbackError(error) from error
                    self._app.check_alive(error)
                    raise _unreadable("failed messages", batch, error) from error
                if line is None:
                    return
                yield dump_entry(line.entry, source=line.source)

        return self._recorder.keep(batch.batch_id, lines()), counts

    def _about(self, lane: int) -> dict[str, Any]:
        name = f"{self._plan.pipeline}.Broadway.BatchProcessor_{self._plan.batcher}_{lane}"
        return {
            "topology_name": self._plan.pipeline,
            "name": name,
            "index": lane,
            "context": self._app.context,
            "producer": self._app.pipeline.producer,
        }

    def _span(self, info: BatchInfo, lane: int, messages: Any) -> telemetry.Span | None:
        if not telemetry.handlers(
            *(f"batch_processor.{e}" for e in ("start", "stop", "exception"))
        ):
            return None
        about = {**self._about(lane), "messages": messages, "batch_info": info}
        return telemetry.Span("batch_processor", about)


def _unreadable(what: str, batch: PlannedBatch, error: BaseException) -> Unreadable:
    return Unreadable(
        f"{what} of the batch {batch.batch_id} cannot be read back"
        f" ({type(error).__name__}: {cut(str(error), MAX_REASON)})"
    )
