"""One batch: its own session, the callback, and the outcome that settles its messages.

Safeguards against wrong outcomes:

* The run must own its messages: this is checked before the callback, and again before the outcome
  is written.
* An exception of the callback fails the batch, unless Spark is lost or the application is being
  stopped.  Then nothing is recorded, and a retry runs the batch again under the same id.
* Unreadable rows of a failed batch affect this batch only.  It fails without ``handle_failed``,
  whose arguments they are.  If even the columns for settlement are unreadable, the batch has no
  outcome; neither has a batch whose files are missing.
* The rows of a batcher with a sink are committed once the entries of failed messages are stored,
  and before the outcome is recorded.
* Few entries are written within the outcome, which is created exclusively.  Many entries are
  written first, to a separate file: of two writers one wins, and the other's entries are ignored.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, PipelineError, StagingError
from airflow_broadway.core.formats.commits import Overtaken, commit_rows
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch, plain_key
from airflow_broadway.core.formats.record_batch import BatchRecorder, Exceptions, OpenBatch
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.connections import Connections, EnvironmentConnections
from airflow_broadway.core.model.message import Status
from airflow_broadway.core.model.sink import CommitInDoubt, SinkClient, SinkEnv
from airflow_broadway.core.stages.callbacks import end_span, log_failure, protected, status_of
from airflow_broadway.core.text import cut, pluralize
from airflow_broadway.spark.entries import Counts, Judge
from airflow_broadway.spark.frame import BatchFrames
from airflow_broadway.spark.results import Failed, Outcomes, read, read_rows
from airflow_broadway.spark.session import Sessions, SparkLost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.spark.arrow import ArrowFiles

log = logging.getLogger(__name__)


class Stopped(BroadwayError):
    """The application is being stopped: running batches have no outcome."""


class Unreadable(BroadwayError):
    """Messages of one batch cannot be read: it has no outcome; other batches continue."""


class _CallbackError(Exception):
    """Carries the error of a returned DataFrame's computation through the writer.

    It is an error of the callback, unlike errors of the writer itself.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True)
class Application:
    """The state shared by all batches of one application.

    :param uri: The run's folder, as a URI for Spark's readers.
    :param files: Access to small files of the same folder.
    :param arrow: Access to its data files where Hadoop has no file system for it.
    :param context: The ``context`` argument of callbacks.
    :param stopping: Returns whether the application is being stopped.
    :param host: The driver's host, for messages.
    :param connections: Resolves the connections of sinks.
    """

    sessions: Sessions
    uri: str
    files: Files
    work: Work
    pipeline: Pipeline
    context: Any
    ownership: Ownership
    arrow: ArrowFiles | None = None
    stopping: Callable[[], bool] = lambda: False
    host: str = field(default_factory=socket.gethostname)
    connections: Connections = field(default_factory=EnvironmentConnections)

    def check_alive(self, cause: BaseException | None = None) -> None:
        """Checks that outcomes may be recorded.

        :raises Stopped: If the application is being stopped.
        :raises SparkLost: If Spark is lost: see :meth:`Sessions.why_lost`.
        :raises PythonMismatch: As that method.
        """
        if self.stopping():
            raise Stopped("the application was stopped") from cause
        loss = self.sessions.why_lost(cause)
        if loss:
            raise SparkLost(loss) from cause


class BatchRunner:
    """Runs the batches of one plan; used from many threads."""

    def __init__(self, application: Application, plan: BatchPlan) -> None:
        self.app = application
        self.plan = plan
        plan.check_sink(application.pipeline.batchers[plan.batcher].commits_uri)
        self.frames = BatchFrames(application.uri, plan, application.arrow)
        work = application.work
        self.recorder = BatchRecorder(
            application.files,
            plan,
            application.ownership,
            writer=f"{work.name} try {work.try_number} on {application.host}",
            try_number=work.try_number,
            fresh=True,
            application_id=application.sessions.application_id,
        )
        shared = application.pipeline, application.context, self.frames
        self.judge = Judge(*shared)
        self.judge_without_callback = Judge(*shared, handle_failed=False)

    def run(self, planned: PlannedBatch, *, lane: int = 0) -> Outcome:
        """Handles one batch and records its outcome; returns the recorded outcome.

        :param lane: The number of the thread, of the batcher's ``concurrency``, from 0.
        :raises LeaseLapsed: If the run no longer holds its messages, or a later try has begun.
        :raises SparkLost: If Spark is lost.
        :raises Stopped: If the application is being stopped.
        :raises Unreadable: If its files are missing, or failed messages cannot be read.
        :raises CommitInDoubt: If it is unknown whether the commit of its rows has landed.
        """
        batch = self.recorder.begin(planned, plain_key(planned.batch_key))
        return _Batch(self, planned, batch, lane).run()


class _Batch:
    """One batch in its own session."""

    def __init__(
        self, runner: BatchRunner, planned: PlannedBatch, batch: OpenBatch, lane: int
    ) -> None:
        self._runner = runner
        self._app = runner.app
        self._planned = planned
        self._batch = batch
        plan = runner.plan
        self._sink: Any = runner.app.pipeline.batchers[plan.batcher].sink
        #: The metadata of its telemetry events.
        self._metadata = {
            "topology_name": plan.pipeline,
            "name": f"{plan.pipeline}.Broadway.BatchProcessor_{plan.batcher}_{lane}",
            "index": lane,
            "context": self._app.context,
            "producer": self._app.pipeline.producer,
            "batch_info": batch.info,
        }
        self._session = runner.app.sessions.open(
            planned.batch_id,
            f"{plan.pipeline} {plan.batcher} {planned.batch_id}",
            f"{plan.batcher}.{lane}",
        )

    def run(self) -> Outcome:
        """Handles the batch and records its outcome; see :meth:`BatchRunner.run`."""
        rows, result = self._run_callback()
        exceptions, counts, whole = self._write_exceptions(result)
        size, committed = self._planned.size, False
        if rows is not None and whole is None and counts.failed + counts.missing < size:
            try:
                self._commit(rows, exceptions, counts)
                committed = True
            except Overtaken as overtaken:
                return self._batch.record_landed(overtaken.attempt)
            except (LeaseLapsed, CommitInDoubt, StagingError):
                raise
            except protected() as error:
                exceptions, counts, whole = self._write_exceptions(self._failed_whole(error))
        if counts.unnamed:
            log.error(
                "%s.handle_batch received %s and returned outcomes of only %d; one without"
                " an outcome is not settled, and goes back to its broker when the run ends",
                type(self._app.pipeline).__name__,
                pluralize(size, "message"),
                size - counts.unnamed,
                extra={"code": "handle_batch_count_mismatch"},
            )
        self._app.check_alive()
        if self._sink is not None and not committed:
            other = self._batch.record_other(self._rule_out, counts.failed + counts.missing)
            if other is not None:
                return other
        return self._batch.record(
            successful=size - counts.failed - counts.missing,
            failed=counts.failed,
            missing=counts.missing,
            exceptions=exceptions,
            error=whole.text if whole else "",
        )

    # -- the callback ------------------------------------------------------------------------------

    def _run_callback(self) -> tuple[Any, Failed | Outcomes | Status | None]:
        """Returns the rows to commit, or ``None``, and the checked result of ``handle_batch``, or
        the status of a failed batch.
        """
        messages = self._read_messages()
        span = None
        if telemetry.observed("batch_processor"):
            span = telemetry.Span("batch_processor", {**self._metadata, "messages": messages})
        rows: Any = None
        result: Failed | Outcomes | Status | None
        try:
            if self._planned.refused is not None:
                result = self._planned.refused
            elif self._sink is not None:
                rows, result = self._rows_of(messages)
            else:
                result = read(self._handle_batch(messages))
        except protected() as error:
            # As in Broadway: a callback that raises fails its batch, and the span still stops.
            if span is not None:
                span.stop(self._metadata)
            return None, self._failed_whole(error)
        except BaseException as error:
            end_span(span, error)
            raise
        if span is not None:
            span.stop(self._metadata)
        return rows, result

    def _rows_of(self, messages: DataFrame) -> tuple[Any, Failed | None]:
        """Returns the rows to commit, and the failed messages."""
        if self._app.pipeline.defines("handle_batch"):
            return read_rows(self._handle_batch(messages))
        data = "data" if self._runner.frames.schema is None else "data.*"
        return messages.select("message_id", data), None

    def _commit(self, rows: DataFrame, exceptions: Exceptions, counts: Counts) -> None:
        """Commits the rows to the batcher's sink; errors as in :func:`commit_rows`."""
        commit = self._batch.begin_commit(
            exceptions,
            successful=self._planned.size - counts.failed - counts.missing,
            failed=counts.failed,
            missing=counts.missing,
        )
        with closing(self._open_sink()) as client:
            commit_rows(client, rows, commit, check=self._app.check_alive)

    def _rule_out(self, commit_ids: list[str]) -> Mapping[str, int]:
        """Rules commits out; see :meth:`SinkClient.rule_out`."""
        with closing(self._open_sink()) as client:
            return client.rule_out(commit_ids)

    def _open_sink(self) -> SinkClient:
        client: SinkClient = self._sink.open_spark(
            self._session, SinkEnv(connections=self._app.connections)
        )
        return client

    def _handle_batch(self, messages: DataFrame) -> object:
        pipeline = self._app.pipeline
        if not pipeline.defines("handle_batch"):
            raise PipelineError(
                f"{type(pipeline).__name__} defines no handle_batch", code="handle_batch_undefined"
            )
        info = self._batch.info
        return pipeline.handle_batch(info.batcher, messages, info, self._app.context)

    def _read_messages(self) -> DataFrame:
        try:
            return self._runner.frames.messages(self._session, self._planned)
        except Exception as error:  # Spark checks that the files exist
            self._app.check_alive(error)
            raise _unreadable_error("messages", self._planned, error) from error

    def _failed_whole(self, error: BaseException) -> Status:
        """Returns the status of a batch whose callback raised, unless Spark or staging is lost."""
        self._app.check_alive(error)
        if self._app.arrow is not None and (reason := self._app.arrow.why_unreadable(error)):
            raise Unreadable(
                f"messages of the batch {self._planned.batch_id} cannot be read back ({reason})"
            ) from error
        log_failure("handle_batch", self._app.pipeline, error, self._planned.size)
        return status_of(error)

    # -- the exceptions ----------------------------------------------------------------------------

    def _write_exceptions(
        self, result: Failed | Outcomes | Status | None
    ) -> tuple[Exceptions, Counts, Status | None]:
        """Writes the batch's exceptions.

        :returns: The exceptions, their counts, and the status of a batch that failed whole.
        """
        whole = result if isinstance(result, Status) else None
        if whole is None:
            try:
                return *self._write(result, self._runner.judge), None
            except _CallbackError as carried:
                # A returned DataFrame is lazy: it is computed, and may raise, only here.
                whole = self._failed_whole(carried.error)
        try:
            return *self._write(whole, self._runner.judge), whole
        except Unreadable as error:
            log.error("%s: they are settled without handle_failed", error)
            return *self._write(whole, self._runner.judge_without_callback), whole

    def _write(
        self, result: Failed | Outcomes | Status | None, judge: Judge
    ) -> tuple[Exceptions, Counts]:
        """Writes the exceptions of one result, streamed."""
        counts = Counts()
        entry_lines = judge.lines(self._session, self._planned, result, counts)
        returned = not isinstance(result, Status)

        def lines() -> Iterator[str]:
            while True:
                try:
                    line = next(entry_lines, None)
                except protected() as error:
                    if returned:
                        raise _CallbackError(error) from error
                    self._app.check_alive(error)
                    raise _unreadable_error("failed messages", self._planned, error) from error
                if line is None:
                    return
                yield line

        return self._batch.keep(lines()), counts


def _unreadable_error(subject: str, batch: PlannedBatch, error: BaseException) -> Unreadable:
    return Unreadable(
        f"{subject} of the batch {batch.batch_id} cannot be read back"
        f" ({type(error).__name__}: {cut(str(error), MAX_REASON)})"
    )
