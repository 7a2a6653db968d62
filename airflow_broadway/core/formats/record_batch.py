"""Records the handling of a batch, for Python batchers and Spark alike.

:meth:`BatchRecorder.begin` checks that the run still holds the batch's messages;
:meth:`OpenBatch.record` checks again, then creates the batch's outcome, which settles them.

In an object store each file costs a round trip to write and one to read, and there may be many
small batches.  So a batch has one file: its outcome, with its exceptions inline if they are few.
Each outcome is created on its own, exclusively and durably, before the thread's next batch begins:
if a process dies, only the batches in process are handled again.  *Gathered* files are copies of
outcomes, for settling to read many together.  Nothing depends on the copies, so they may be lost or
damaged at any time.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.commits import commit_id, commit_ids, record_landed
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from airflow_broadway.core.model.sink import Commit, CommitInDoubt
from airflow_broadway.core.text import cut

log = logging.getLogger(__name__)

#: Bytes of exceptions that are inline in an outcome; more are in a file of their own.
INLINE_BYTES = 256 * 1024
#: Outcomes in one file of copies, and its bytes, at most (an outcome is never divided).
GATHERED, GATHERED_BYTES = 1000, 1024 * 1024


class Exceptions(NamedTuple):
    """The exceptions of a batch, as its :class:`Outcome` references or contains them."""

    lines: list[str] | None = None
    entries: str | None = None
    entries_sum: dict[str, Any] | None = None


class BatchRecorder:
    """Records the outcomes of one plan's batches; used from many threads.

    :param ownership: The right to handle them.
    :param writer: The handling try, for display: task, try, host.
    :param try_number: The try number of its task, from 1; becomes ``BatchInfo.attempt``.
    :param fresh: Whether ownership is checked again before each outcome, instead of at most a
        second earlier; see :mod:`airflow_broadway.core.formats.ownership`.
    :param application_id: Spark's id of the application; empty without Spark.
    """

    def __init__(
        self,
        files: Files,
        plan: BatchPlan,
        ownership: Ownership,
        *,
        writer: str,
        try_number: int = 1,
        fresh: bool = False,
        application_id: str = "",
        clock: Clock | None = None,
    ) -> None:
        self.plan = plan
        self.ownership = ownership
        self.writer = writer
        self.try_number = try_number
        self.fresh = fresh
        self.application_id = application_id
        self.clock = clock or SystemClock()
        self.files = files
        #: A unique part of its file names.
        self._tag = f"{try_number:06d}-{uuid.uuid4().hex[:8]}"
        self._lock = threading.Lock()
        self._texts: list[str] = []
        self._number = 0

    def begin(self, batch: PlannedBatch, key: Any) -> OpenBatch:
        """Begins to handle a batch.

        :param key: The batch's key as the pipeline set it.
        :raises OwnershipLost: If a later try has begun.
        :raises LeaseLapsed: If this run no longer holds the batch's messages.
        """
        self.ownership.check(batch.sources)
        return OpenBatch(self, batch, key)

    def keep(self, batch_id: str, lines: Iterable[str]) -> Exceptions:
        """Stores the exceptions of a batch, streamed: inline if few, else in a file.

        :param lines: As written by :func:`dump_entry`.
        """
        stream = iter(lines)
        inline: list[str] = []
        size = 0
        for line in stream:
            inline.append(line)
            size += len(line.encode("utf-8", "surrogatepass")) + 1
            if size > INLINE_BYTES:
                break
        else:
            return Exceptions(lines=inline or None)
        # The exceptions of one batch may be streamed twice, the first time without a result.
        writer = f"{self._tag}-{uuid.uuid4().hex[:8]}"
        path = paths.outcome_entries(self.plan.path, batch_id, writer)
        summing = Summing()
        self.files.write_lines(path, summing.through(chain(inline, stream)))
        return Exceptions(entries=path, entries_sum=summing.to_json())

    def record(self, outcome: Outcome) -> Outcome:
        """Records an outcome, durably, unless its batch has one; returns the valid one."""
        path, text = paths.outcome(self.plan.path, outcome.batch_id), outcome.dumps()
        if not self.files.create(path, text):
            # A client without a reply retries, and may find what it wrote itself.
            existing = self.files.read(path)
            if existing != text:
                log.warning("Another try recorded batch %s first; this one's result is void.", path)
                return Outcome.loads(existing, path)
        with self._lock:
            self._texts.append(text)
        self._gather()
        return outcome

    def prepare(self, path: str, outcome: Outcome) -> None:
        """Stores the outcome of an attempt before its commit, durably."""
        self.files.replace(path, outcome.dumps())

    def finish(self) -> None:
        """Writes the remaining copies; no further batch follows."""
        self._gather(last=True)

    def _gather(self, *, last: bool = False) -> None:
        """Writes copies once there are enough, and the last ones; one outcome alone gets none."""
        with self._lock:
            full = len(self._texts) >= GATHERED or sum(map(len, self._texts)) >= GATHERED_BYTES
            if not (full or last):
                return
            texts, self._texts = self._texts, []
            if not full and len(texts) < 2:
                return
            self._number += 1
            path = paths.gathered(self.plan.path, self._tag, self._number)
        try:
            self.files.create(path, "".join(f"{text}\n" for text in texts))
        except Exception as error:
            # The outcomes themselves exist, and are read one by one.
            log.warning("Could not gather the outcomes of %d batches: %s", len(texts), error)


class OpenBatch:
    """A batch in process; created by :meth:`BatchRecorder.begin`.

    :param info: The information for its callback.
    """

    def __init__(self, recorder: BatchRecorder, batch: PlannedBatch, key: Any) -> None:
        self._recorder = recorder
        self._batch = batch
        self._started_at = recorder.clock.now().isoformat()
        self._began = recorder.clock.monotonic()
        self.info = BatchInfo(
            batcher=recorder.plan.batcher,
            batch_key=key,
            partition=batch.partition,
            size=batch.size,
            trigger=Trigger(batch.trigger),
            batch_id=batch.batch_id,
            redelivered=batch.redelivered,
            attempt=recorder.try_number,
        )

    def keep(self, lines: Iterable[str]) -> Exceptions:
        """Stores the exceptions; see :meth:`BatchRecorder.keep`."""
        return self._recorder.keep(self._batch.batch_id, lines)

    def begin_commit(self, exceptions: Exceptions, **counts: Any) -> Commit:
        """Begins the commit of the batch's rows; stores its outcome if messages failed.

        :param counts: The other parameters of :meth:`record`.
        :raises OwnershipLost: If a later try has begun.
        :raises LeaseLapsed: If this run no longer holds the batch's messages.
        """
        recorder, batch_id = self._recorder, self._batch.batch_id
        plan, attempt = recorder.plan, max(1, recorder.ownership.try_number)
        recorder.ownership.check(self._batch.sources, fresh=recorder.fresh)
        if exceptions != Exceptions():
            outcome = self._make_outcome(exceptions=exceptions, **counts)
            recorder.prepare(paths.prepared(plan.path, batch_id, attempt), outcome)
        return Commit(
            commit_id=commit_id(batch_id, plan.generations),
            attempt=attempt,
            batch=self.info,
            pipeline=plan.pipeline,
        )

    def record(self, **result: Any) -> Outcome:
        """Records the batch's outcome; the parameters are those of :meth:`_make_outcome`.

        :returns: The valid outcome: this one, or that of a try which was first.
        :raises OwnershipLost: If a later try has begun.
        :raises LeaseLapsed: If this run no longer holds the batch's messages.
        """
        recorder = self._recorder
        outcome = self._make_outcome(**result)
        recorder.ownership.check(self._batch.sources, fresh=recorder.fresh)
        return recorder.record(outcome)

    def record_landed(self, attempt: int) -> Outcome:
        """Records the outcome of another attempt, whose commit has landed."""
        recorder, plan = self._recorder, self._recorder.plan
        ids = commit_ids(plan, [self._batch])
        landed = dict.fromkeys(ids, attempt)
        return record_landed(recorder.files, plan, ids, landed, by=recorder.writer)[0]

    def record_other(
        self, rule_out: Callable[[list[str]], Mapping[str, int]], unsuccessful: int
    ) -> Outcome | None:
        """Rules the batch's commit out, before an outcome of a batch without rows is recorded.

        Otherwise a paused earlier try could still commit rows of messages that failed here, or are
        to be released, or a later one, if this one is paused before it records them.

        :param rule_out: As of :class:`.SinkClient`.
        :param unsuccessful: The number of messages that failed or have no outcome.
        :returns: The outcome of another try, if its commit has landed.
        :raises LeaseLapsed: If this run no longer holds the batch's messages.
        :raises CommitInDoubt: If the sink cannot be reached.
        """
        recorder = self._recorder
        first = recorder.ownership.try_number <= 1
        if first and not unsuccessful:
            return None
        recorder.ownership.check(self._batch.sources, fresh=recorder.fresh)
        ids = commit_ids(recorder.plan, [self._batch])
        try:
            landed = rule_out(list(ids))
        except Exception as error:
            if first:  # the reason why they failed, most likely
                log.warning("The sink cannot be reached: %s", reason_of(error))
                return None
            raise CommitInDoubt(
                f"an earlier try may commit the batch {self._batch.batch_id}, and its sink cannot"
                f" be reached to rule that out ({reason_of(error)})"
            ) from error
        files, plan, by = recorder.files, recorder.plan, recorder.writer
        return next(iter(record_landed(files, plan, ids, landed, by=by)), None)

    def _make_outcome(
        self,
        *,
        successful: int,
        failed: int,
        missing: int,
        exceptions: Exceptions,
        error: str = "",
        settled_now: dict[str, Any] | None = None,
    ) -> Outcome:
        """Builds the batch's outcome; the parameters are those of :class:`Outcome`."""
        recorder = self._recorder
        return Outcome(
            batch_id=self._batch.batch_id,
            batcher=recorder.plan.batcher,
            plan=recorder.plan.path,
            successful=successful,
            failed=failed,
            missing=missing,
            **exceptions._asdict(),
            error=cut(error, MAX_REASON),
            writer=recorder.writer,
            try_number=recorder.try_number,
            started_at=self._started_at,
            seconds=round(recorder.clock.monotonic() - self._began, 6),
            application_id=recorder.application_id,
            settled_now=settled_now or {},
        )
