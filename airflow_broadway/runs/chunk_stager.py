"""The end of a chunk in a process task: each message is staged for its batcher, or its verdict is.

A verdict becomes a line of the entries file, whether a processor failed the message, a callback
settled it at once, or nobody has said what became of it: then it is given back.
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

#: Carries verdicts out at the broker: the report, what is done, and what is not; see
#: :func:`airflow_broadway.core.custody.in_process.settle_at_once`.
SettleAtOnce = Callable[[list[Entry]], tuple[SettleReport, list[Entry], list[Entry]]]


class ChunkStager:
    """Stages chunks, from one thread; the sink of the run's acknowledger.

    :param settle_at_once: Serves ``ack_immediately``, from whichever thread a callback is in.
    """

    def __init__(
        self, pipeline: Pipeline, writer: ProcessWriter, settle_at_once: SettleAtOnce
    ) -> None:
        self._pipeline = pipeline
        self._writer = writer
        self._settle_at_once = settle_at_once
        #: What callbacks settled at once, by message id, until its chunk is staged.
        self._now: dict[str, Verdict] = {}
        #: Held while something is settled at once, and to close: nothing is settled so afterwards.
        self._lock = threading.Lock()
        self._closed = False
        #: Messages that callbacks failed, and why.
        self.failed = 0
        self.reasons = Reasons()
        #: What was settled at once.
        self.settled_now = SettleReport()

    @property
    def staged(self) -> Mapping[str, int]:
        """How many messages were staged so far, for each batcher."""
        return self._writer.counts

    def stage(self, chunk: Sequence[Message], result: ChunkResult) -> None:
        """Stage what became of each message of a chunk.

        :raises StagingError: If it cannot be written.
        """
        successful, failed = self._marked(result.successful), self._marked(result.failed)
        self.failed += len(failed)
        self.reasons.add(failed)
        # Successes without a batcher end here, as failures do: their verdicts come to `record`.
        ended = [] if self._pipeline.batchers else successful
        ack_messages_or_raise(ended, failed)
        if self._pipeline.batchers:
            self._writer.messages(successful)
        at_once = [each for each in (*ended, *failed) if is_settled(each)]
        settled = [entry_of(each, self._now.get(each.message_id, ACK)) for each in at_once]
        self._writer.entries(settled, settled=True)
        if self._now:
            for each in (*successful, *failed):
                self._now.pop(each.message_id, None)
        self.give_back(_unaccounted(chunk, successful, failed))
        if self._pipeline.defines("handle_failed"):  # else nobody could ask for them till now
            for message in failed:
                forget_trace(message.status.reason)

    def give_back(self, messages: Iterable[Message]) -> None:
        """Give back what has no outcome, unless a callback settled it at once."""
        for message in messages:
            verdict = self._now.pop(message.message_id, None)
            entry = entry_of(message, verdict or RELEASE)
            self._writer.entries([entry], settled=verdict is not None)

    def close(self) -> None:
        """Settle nothing at once any more: what is not staged is about to be given back."""
        with self._lock:
            self._closed = True

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Stage verdicts; see :class:`~airflow_broadway.core.custody.acknowledger.AckSink`."""
        self._writer.entries(entry_of(*judged) for judged in (*successful, *failed))

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Carry verdicts out at the broker, for ``ack_immediately``.

        :raises LeaseLapsed: If the run has ended, or no longer holds some of them.
        :raises ProducerError: If the broker refuses.
        """
        with self._lock:
            if self._closed:
                raise LeaseLapsed("the run has ended and given this message back")
            judged = (*successful, *failed)
            entries = [entry_of(*each) for each in judged if each[0].message_id not in self._now]
            report, done, _ = self._settle_at_once(entries)
            # What is done counts, though the callback hears of an error.
            self.settled_now += done_of(report)
            self._now.update((entry.message_id, entry.verdict) for entry in done)
        check_settled(report)

    def _marked(self, messages: list[Message]) -> list[Message]:
        """Mark what was settled while others of the same call were refused: its callback, which
        heard of an error, does not know.
        """
        if not self._now:
            return messages
        return [
            message.with_acknowledger(NO_ACK) if message.message_id in self._now else message
            for message in messages
        ]


def _unaccounted(
    chunk: Sequence[Message], successful: Sequence[Message], failed: Sequence[Message]
) -> list[Message]:
    """Those of a chunk that no callback returned: they must not be taken for successes."""
    if len(chunk) == len(successful) + len(failed):
        return []  # a stage returns each of its messages once at most, and no other
    seen = {message.message_id for message in (*successful, *failed)}
    return [message for message in chunk if message.message_id not in seen]
