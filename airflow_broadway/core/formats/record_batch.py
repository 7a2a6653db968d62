"""How the handling of a batch is recorded, by Python's batchers and by Spark's alike.

:meth:`BatchRecorder.begin` looks whether the run still holds the batch's messages;
:meth:`OpenBatch.record` looks again, then creates the batch's outcome, which settles them.

In an object store each file costs a round trip to write and one to read, and small batches are
many.  So a batch has one file: its outcome, with its exceptions in it where they are few.  Each
outcome is created by itself, exclusively and durably, before the next batch of the same thread
begins: whenever a process dies, only the batches that were at work are handled again.  What is
*gathered* is copies, for who settles to read many at once.  Nothing depends on the copies, so they
may be lost, or damaged, at any time.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from airflow_broadway.core.text import cut

log = logging.getLogger(__name__)

#: Bytes of exceptions that an outcome holds itself; more have a file of their own.
INLINE_BYTES = 256 * 1024
#: Outcomes in one file of copies, and its bytes, at most (but one outcome is never parted).
GATHERED, GATHERED_BYTES = 1000, 1024 * 1024


class Exceptions(NamedTuple):
    """The exceptions of a batch as its :class:`Outcome` names or holds them."""

    lines: list[str] | None = None
    entries: str | None = None
    entries_sum: dict[str, Any] | None = None


class BatchRecorder:
    """Records what became of one plan's batches; used from many threads.

    :param ownership: The right to handle them.
    :param writer: Who handles them, for people: task, try, host.
    :param try_number: Which try of its task this is, from 1; it becomes ``BatchInfo.attempt``.
    :param fresh: Whether the right is read anew before each outcome, rather than at most a second
        old; see :mod:`airflow_broadway.core.formats.ownership`.
    :param application_id: Spark's name of the application; empty without Spark.
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
        self._files = files
        #: Part of the names of its files; of nobody else's.
        self._tag = f"{try_number:06d}-{uuid.uuid4().hex[:8]}"
        self._lock = threading.Lock()
        self._held: list[str] = []
        self._bytes = 0
        self._number = 0

    def begin(self, batch: PlannedBatch, key: Any) -> OpenBatch:
        """Begin to handle a batch.

        :param key: The batch's key as the pipeline gave it.
        :raises OwnershipLost: If a later try has begun.
        :raises LeaseLapsed: If this run no longer holds the batch's messages.
        """
        self.ownership.check(batch.sources)
        return OpenBatch(self, batch, key)

    def keep(self, batch_id: str, lines: Iterable[str]) -> Exceptions:
        """Keep the exceptions of a batch, streamed: few for its outcome to hold, more in a file.

        :param lines: As :func:`dump_entry` makes them.
        """
        stream = iter(lines)
        few: list[str] = []
        size = 0
        for line in stream:
            few.append(line)
            size += len(line.encode("utf-8", "surrogatepass")) + 1
            if size > INLINE_BYTES:
                break
        else:
            return Exceptions(lines=few or None)
        # The exceptions of one batch may be streamed twice, the first time in vain.
        writer = f"{self._tag}-{uuid.uuid4().hex[:8]}"
        path = paths.outcome_entries(self.plan.path, batch_id, writer)
        summing = Summing()
        self._files.write_lines(path, summing.through(chain(few, stream)))
        return Exceptions(entries=path, entries_sum=summing.to_json())

    def record(self, outcome: Outcome) -> Outcome:
        """Record an outcome, durably, unless its batch has one; returns the one that stands."""
        path, text = paths.outcome(self.plan.path, outcome.batch_id), outcome.dumps()
        if not self._files.create(path, text):
            # A client that hears no answer tries again, and meets what it wrote itself.
            there = self._files.read(path)
            if there != text:
                log.warning("Another try recorded batch %s first; this one's result is void.", path)
                return Outcome.loads(there, path)
        with self._lock:
            self._held.append(text)
            self._bytes += len(text)
            if len(self._held) < GATHERED and self._bytes < GATHERED_BYTES:
                return outcome
            held = self._take()
        self._write(*held)
        return outcome

    def finish(self) -> None:
        """Write the copies that are not written yet: no further batch comes."""
        with self._lock:
            held = self._take()
        if len(held[1]) > 1:  # of one there is no need to have two
            self._write(*held)

    def _take(self) -> tuple[int, list[str]]:
        held, self._held = self._held, []
        self._bytes = 0
        self._number += 1
        return self._number, held

    def _write(self, number: int, texts: list[str]) -> None:
        path = paths.gathered(self.plan.path, self._tag, number)
        try:
            self._files.create(path, "".join(f"{text}\n" for text in texts))
        except Exception as error:
            # The outcomes themselves are there, and are read one by one.
            log.warning("Could not gather the outcomes of %d batches: %s", len(texts), error)


class OpenBatch:
    """A batch that is being handled; made by :meth:`BatchRecorder.begin`.

    :param info: What its callback is told of it.
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
        """See :meth:`BatchRecorder.keep`."""
        return self._recorder.keep(self._batch.batch_id, lines)

    def record(
        self,
        *,
        successful: int,
        failed: int,
        missing: int,
        exceptions: Exceptions,
        error: str = "",
        settled_now: dict[str, Any] | None = None,
    ) -> Outcome:
        """Record what became of the batch; the parameters are those of :class:`Outcome`.

        :returns: The outcome that stands: this one, or that of a try which was first.
        :raises OwnershipLost: If a later try has begun.
        :raises LeaseLapsed: If this run no longer holds the batch's messages.
        """
        recorder = self._recorder
        seconds = recorder.clock.monotonic() - self._began
        recorder.ownership.check(self._batch.sources, fresh=recorder.fresh)
        return recorder.record(
            Outcome(
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
                seconds=round(seconds, 6),
                application_id=recorder.application_id,
                settled_now=settled_now or {},
            )
        )
