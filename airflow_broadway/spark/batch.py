"""One batch: a session of its own, the callback, and the outcome that settles its messages.

What stands between a batch and a wrong outcome:

* The run must own its messages: this is checked before the callback, and again, freshly, before the
  outcome is written.
* What the callback raises fails the batch, unless Spark itself is gone or the application is being
  stopped.  Then nothing is recorded, and a retry runs the batch again under the same id.
* Rows of a failed batch that cannot be read back concern their batch alone.  It fails without
  ``handle_failed``, which would get them.  If even what settling needs cannot be read, it has no
  outcome, and neither has a batch whose files are not there.
* Few entries are written with the outcome, which is created exclusively.  Many are written before
  it, under a name of their own: of two writers one wins, and nobody reads the other's entries.
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
from airflow_broadway.core.model.message import Status
from airflow_broadway.core.stages.callbacks import end_span, log_failure, protected, status_of
from airflow_broadway.core.text import cut, many
from airflow_broadway.spark.entries import Counts, Judge
from airflow_broadway.spark.frame import BatchFrames
from airflow_broadway.spark.results import Failed, Outcomes, read
from airflow_broadway.spark.session import end_session, name_jobs, new_session, why_lost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_broadway.core.pipeline import Pipeline

log = logging.getLogger(__name__)

#: The events of telemetry that are about batches.
_EVENTS = ("batch_processor.start", "batch_processor.stop", "batch_processor.exception")


class SparkLost(BroadwayError):
    """Spark is gone: what was running has no outcome."""


class Stopped(BroadwayError):
    """The application is being stopped: what was running has no outcome."""


class Unreadable(BroadwayError):
    """Messages of one batch cannot be read back: it has no outcome, and others go on."""


class _CallbackError(Exception):
    """What a returned DataFrame raised when it was computed, on its way through the writing.

    It is the callback's error; one of the writing itself is not.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True)
class Application:
    """What all batches of one application share.

    :param uri: The run's folder, for Spark's readers.
    :param files: The same folder, for its small files.
    :param context: What callbacks get as ``context``.
    :param stopping: Whether the application is to stop.
    :param application_id: Spark's name of it; empty under Connect.
    :param host: The driver's host, for people.
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

        :raises Stopped: If the application is to stop.
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
        self.app = application
        self.plan = plan
        self.frames = BatchFrames(application.uri, plan)
        work = application.work
        self.recorder = BatchRecorder(
            application.files,
            plan,
            application.ownership,
            writer=f"{work.name} try {work.try_number} on {application.host}",
            try_number=work.try_number,
            fresh=True,
            application_id=application.application_id,
        )
        about = application.pipeline, application.context, self.frames
        self.judge = Judge(*about)
        self.judge_without_callback = Judge(*about, handle_failed=False)

    def run(self, planned: PlannedBatch, *, lane: int = 0) -> Outcome:
        """Handle one batch and record its outcome; returns the one that stands.

        :param lane: Which of the batcher's ``concurrency`` threads runs it, from 0.
        :raises LeaseLapsed: If the run no longer holds its messages, or a later try has begun.
        :raises SparkLost: If Spark is gone.
        :raises Stopped: If the application is to stop.
        :raises Unreadable: If its files are not there, or what failed cannot be read back.
        """
        batch = self.recorder.begin(planned, plain_key(planned.batch_key))
        session = new_session(self.app.spark)
        try:
            return _Batch(self, planned, batch, session, lane).run()
        finally:
            end_session(session)

    def finish(self) -> None:
        """Say that no further batch comes."""
        self.recorder.finish()


class _Batch:
    """One batch on its way through a session of its own."""

    def __init__(
        self,
        runner: BatchRunner,
        planned: PlannedBatch,
        batch: OpenBatch,
        session: SparkSession,
        lane: int,
    ) -> None:
        self._runner = runner
        self._app = runner.app
        self._planned = planned
        self._batch = batch
        self._session = session
        plan = runner.plan
        #: What telemetry says of it.
        self._about = {
            "topology_name": plan.pipeline,
            "name": f"{plan.pipeline}.Broadway.BatchProcessor_{plan.batcher}_{lane}",
            "index": lane,
            "context": self._app.context,
            "producer": self._app.pipeline.producer,
            "batch_info": batch.info,
        }
        name_jobs(
            session,
            planned.batch_id,
            f"{plan.pipeline} {plan.batcher} {planned.batch_id}",
            f"{plan.batcher}.{lane}",
        )

    def run(self) -> Outcome:
        """Handle it and record its outcome; see :meth:`BatchRunner.run`."""
        found = self._call()
        exceptions, counts, whole = self._keep(found)
        size = self._planned.size
        if counts.unnamed:
            log.error(
                "%s.handle_batch received %s and returned outcomes of only %d; one without"
                " an outcome is not settled, and goes back to its broker when the run ends",
                type(self._app.pipeline).__name__,
                many(size, "message"),
                size - counts.unnamed,
                extra={"code": "handle_batch_count_mismatch"},
            )
        self._app.check_alive()
        return self._batch.record(
            successful=size - counts.failed - counts.missing,
            failed=counts.failed,
            missing=counts.missing,
            exceptions=exceptions,
            error=whole.text if whole else "",
        )

    # -- the callback ------------------------------------------------------------------------------

    def _call(self) -> Failed | Outcomes | Status | None:
        """What ``handle_batch`` returned, checked; or the status of a batch that failed whole."""
        messages = self._messages()
        span = None
        if telemetry.handlers(*_EVENTS):
            span = telemetry.Span("batch_processor", {**self._about, "messages": messages})
        try:
            found = self._planned.refused or read(self._handle_batch(messages))
        except protected() as error:
            # As in Broadway: a callback that raises fails its batch, and the span still stops.
            if span is not None:
                span.stop(self._about)
            return self._failed_whole(error)
        except BaseException as error:
            end_span(span, error)
            raise
        if span is not None:
            span.stop(self._about)
        return found

    def _handle_batch(self, messages: DataFrame) -> object:
        pipeline = self._app.pipeline
        if not pipeline.defines("handle_batch"):
            raise PipelineError(
                f"{type(pipeline).__name__} defines no handle_batch", code="handle_batch_undefined"
            )
        info = self._batch.info
        return pipeline.handle_batch(info.batcher, messages, info, self._app.context)

    def _messages(self) -> DataFrame:
        try:
            return self._runner.frames.messages(self._session, self._planned)
        except Exception as error:  # Spark looks whether the files are there
            self._app.check_alive(error)
            raise _unreadable("messages", self._planned, error) from error

    def _failed_whole(self, error: BaseException) -> Status:
        """The status of a batch whose callback raised, unless Spark is to blame."""
        self._app.check_alive(error)
        log_failure("handle_batch", self._app.pipeline, error, self._planned.size)
        return status_of(error)

    # -- the exceptions ----------------------------------------------------------------------------

    def _keep(
        self, found: Failed | Outcomes | Status | None
    ) -> tuple[Exceptions, Counts, Status | None]:
        """Keep the batch's exceptions.

        :returns: They, their counts, and the status of a batch that failed whole.
        """
        whole = found if isinstance(found, Status) else None
        if whole is None:
            try:
                return *self._write(found, self._runner.judge), None
            except _CallbackError as carried:
                # A frame is lazy: what was returned is computed, and may raise, only here.
                whole = self._failed_whole(carried.error)
        try:
            return *self._write(whole, self._runner.judge), whole
        except Unreadable as error:
            log.error("%s: they are settled without handle_failed", error)
            return *self._write(whole, self._runner.judge_without_callback), whole

    def _write(
        self, found: Failed | Outcomes | Status | None, judge: Judge
    ) -> tuple[Exceptions, Counts]:
        """Write the exceptions, streamed."""
        counts = Counts()
        entries = judge.entries(self._session, self._planned, found, counts)
        returned = not isinstance(found, Status)

        def lines() -> Iterator[str]:
            while True:
                try:
                    line = next(entries, None)
                except protected() as error:
                    if returned:
                        raise _CallbackError(error) from error
                    self._app.check_alive(error)
                    raise _unreadable("failed messages", self._planned, error) from error
                if line is None:
                    return
                yield dump_entry(line.entry, source=line.source)

        return self._batch.keep(lines()), counts


def _unreadable(what: str, batch: PlannedBatch, error: BaseException) -> Unreadable:
    return Unreadable(
        f"{what} of the batch {batch.batch_id} cannot be read back"
        f" ({type(error).__name__}: {cut(str(error), MAX_REASON)})"
    )
