"""Stages the results of a chunk in a process task: messages for batchers, or verdicts.

A verdict becomes a line of the entries file.  It is that of a message that failed in a processor,
was settled by a callback immediately, or has no outcome and is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from airflow_broadway.core.custody.acknowledger import Judged
from airflow_broadway.core.custody.in_process import check_settled, done_of, entry_of
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Verdict
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.model.acks import NO_ACK, ack_messages_or_raise, is_settled
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.failure_log import Reasons, forget_trace
from airflow_broadway.core.stages.processor import ChunkResult
from airflow_broadway.staging.writer import ProcessWriter

#: Executes verdicts at the broker; returns the report, the entries done and those not done; see
#: :func:`airflow_broadway.core.custody.in_process.settle_at_once`.
SettleAtOnce = Callable[[list[Entry]], tuple[SettleReport, list[Entry], list[Entry]]]


class ChunkStager:
    """Stages chunks from one thread; the sink of the run's acknowledger.

    :param settle_at_once: Executes ``ack_immediately``; called from any callback's thread.
    """

    def __init__(
        self, pipeline: Pipeline, writer: ProcessWriter, settle_at_once: SettleAtOnce
    ) -> None:
        self._pipeline = pipeline
        self._writer = writer
        self._settle_now = settle_at_once
        #: Verdicts settled immediately by callbacks, by message id, until the chunk is staged.
        self._now: dict[str, Verdict] = {}
        #: Held during an immediate settlement and during close, after which there is none.
        self._lock = threading.Lock()
        self._closed = False
        #: The number of messages that failed, and the reasons.
        self.failed = 0
        self.reasons = Reasons()
        #: The report of immediate settlements.
        self.settled_now = SettleReport()

    @property
    def staged(self) -> Mapping[str, int]:
        """Number of messages staged so far, per batcher."""
        return self._writer.counts

    def stage(self, chunk: Sequence[Message], result: ChunkResult) -> None:
        """Stages the result of each message of a chunk.

        :raises StagingError: If a file cannot be written.
        """
        successful, failed = self._marked(result.successful), self._marked(result.failed)
        self.failed += len(failed)
        self.reasons.add(failed)
        # Without batchers successes end here like failures: `record` receives their verdicts.
        ended = [] if self._pipeline.batchers else successful
        ack_messages_or_raise(ended, failed)
        if self._pipeline.batchers:
            self._writer.messages(successful)
        done = [message for message in (*ended, *failed) if is_settled(message)]
        settled = [entry_of(message, self._now.get(message.message_id, ACK)) for message in done]
        self._writer.entries(settled, settled=True)
        if self._now:
            for message in (*successful, *failed):
                self._now.pop(message.message_id, None)
        self.release(_without_result(chunk, successful, failed))
        if self._pipeline.defines("handle_failed"):  # otherwise no code needed the traces
            for message in failed:
                forget_trace(message.status.reason)

    def release(self, messages: Iterable[Message]) -> None:
        """Releases messages without an outcome, unless a callback settled them immediately."""
        for message in messages:
            verdict = self._now.pop(message.message_id, None)
            entry = entry_of(message, verdict or RELEASE)
            self._writer.entries([entry], settled=verdict is not None)

    def close(self) -> None:
        """Ends immediate settlement: messages that are not staged will be released."""
        with self._lock:
            self._closed = True

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Stages verdicts; see :class:`~airflow_broadway.core.custody.acknowledger.AckSink`."""
        self._writer.entries(entry_of(*judged) for judged in (*successful, *failed))

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Executes verdicts at the broker, for ``ack_immediately``.

        :raises LeaseLapsed: If the run has ended, or no longer holds some of them.
        :raises ProducerError: If the broker refuses.
        """
        with self._lock:
            if self._closed:
                raise LeaseLapsed("the run has ended and released this message")
            judged = (*successful, *failed)
            entries = [entry_of(*pair) for pair in judged if pair[0].message_id not in self._now]
            report, done, _ = self._settle_now(entries)
            # Executed verdicts count, even if an error is raised to the callback.
            self.settled_now += done_of(report)
            self._now.update((entry.message_id, entry.verdict) for entry in done)
        check_settled(report)

    def _marked(self, messages: list[Message]) -> list[Message]:
        """Marks messages settled by a call that raised because the broker refused others.

        The callback does not know that these are settled.
        """
        if not self._now:
            return messages
        return [
            message.with_acknowledger(NO_ACK) if message.message_id in self._now else message
            for message in messages
        ]


def _without_result(
    chunk: Sequence[Message], successful: Sequence[Message], failed: Sequence[Message]
) -> list[Message]:
    """Returns the messages of a chunk without a result, which must not count as successes."""
    if len(chunk) == len(successful) + len(failed):
        return []  # a stage returns each message at most once
    seen = {message.message_id for message in (*successful, *failed)}
    return [message for message in chunk if message.message_id not in seen]
