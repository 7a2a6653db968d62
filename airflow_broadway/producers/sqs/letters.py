"""The dead letters of an SQS producer, for people.

SQS shows a message only by receiving it: whoever looks hides letters from others for a while, and
each look counts as a receive.  What is not moved is shown again at once.  A letter is deleted once
SQS has taken its message, so that whoever is killed leaves it in both queues at most; there it is a
new message to SQS, and received as redelivered.

Of a FIFO queue SQS shows only the first few of each message group until these are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.dead_letters import DeadLetter, destination_of
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.looks import LookCount
from airflow_broadway.producers.kit.receipts.batch_requests import BatchRequests, Refusal
from airflow_broadway.producers.kit.receipts.letters import ReceivedLetters
from airflow_broadway.producers.sqs import dead_letters
from airflow_broadway.producers.sqs.batch_requests import batch_requests, call_of
from airflow_broadway.producers.sqs.client import Queue, open_queue
from airflow_broadway.producers.sqs.errors import Denied
from airflow_broadway.producers.sqs.inspect import dead_letter_queue, max_receives
from airflow_broadway.producers.sqs.limits import MAX_BATCH
from airflow_broadway.producers.sqs.reading import as_json, receives_of

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["SqsDeadLetters"]

#: Seconds for which letters are hidden while they are looked at.
_HIDDEN_SECONDS: Final = 300
#: Seconds that a receive waits, for SQS to ask all of its servers: an empty answer is the end.
_WAIT_SECONDS = 1


class SqsDeadLetters(ReceivedLetters):
    """Those of one queue; a :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.

    :param place: The queue to look into, by URL, ARN or name, instead of the producer's.
    :raises ProducerError: If there is no queue for dead letters.
    """

    def __init__(self, producer: SqsOptions, env: ProducerEnv, place: str | None) -> None:
        self._queue = open_queue(producer, env)
        try:
            self._dead = (
                self._queue.other(place) if place else dead_letter_queue(producer, self._queue)
            )
        except BaseException:  # a kill too; raised again
            self._queue.close()
            raise
        self._requests = batch_requests(1, env.clock)
        self._staging = env.staging
        self._targets: dict[str, Queue] = {self._queue.name: self._queue}

    @property
    def place(self) -> str:
        return f"queue {self._dead.name!r}"

    def count(self) -> int:
        """About: SQS counts messages so; those that somebody looks at are counted too."""
        attributes = self._dead.attributes("All")
        names = ("", "NotVisible", "Delayed")
        return sum(int(attributes.get(f"ApproximateNumberOfMessages{name}", 0)) for name in names)

    def close(self) -> None:
        self._requests.close()
        self._queue.close()

    # -- moving --------------------------------------------------------------------------------

    def _looking(self) -> _Looking:
        return _Looking(self._dead, self._requests)

    def _looks(self) -> LookCount:
        try:
            limit = max_receives(self._dead)
        except Denied:  # what SQS then moves goes to yet another queue, and is not deleted
            limit = None
        return LookCount(self._staging, f"the queue {self._dead.name!r}", limit, "maxReceiveCount")

    def _deliveries(self, raw: Mapping[str, Any]) -> int:
        return receives_of(raw)

    def _key(self, raw: Mapping[str, Any]) -> str:
        return str(raw["MessageId"])

    def _back(
        self, letter: DeadLetter, raw: Mapping[str, Any], to: str | None
    ) -> tuple[str, dict[str, Any]]:
        target = destination_of(letter, [self._queue.name], to)
        fifo = self._target(target).url.endswith(".fifo")
        why = dead_letters.why_of(raw.get("MessageAttributes") or {})
        return target, dead_letters.sent_back(raw, why, letter.original_id, fifo=fifo)

    def _send(self, target: str, made: Mapping[str, dict[str, Any]]) -> Mapping[str, str]:
        requests = dead_letters.requests(made)
        refused = self._requests.send_requests(call_of(self._target(target).send), requests)
        return {key: f"{each.code}: {each.text}" for key, each in refused.items()}

    def _delete(self, raws: Sequence[Mapping[str, Any]]) -> Mapping[str, Refusal]:
        entries = ((self._key(raw), {"ReceiptHandle": raw["ReceiptHandle"]}) for raw in raws)
        return self._requests.send(call_of(self._dead.delete), entries)

    def _target(self, name: str) -> Queue:
        if name not in self._targets:
            self._targets[name] = self._queue.other(name)
        return self._targets[name]

    # -- one letter ----------------------------------------------------------------------------

    def _letter(self, raw: Mapping[str, Any]) -> DeadLetter:
        why = dead_letters.why_of(raw.get("MessageAttributes") or {})
        system: Mapping[str, str] = raw.get("Attributes") or {}
        source = system.get("DeadLetterQueueSourceArn", "")
        return DeadLetter(
            message_id=raw["MessageId"],
            body=raw["Body"].encode("utf-8", "surrogatepass"),
            properties=as_json({**raw, "MessageAttributes": why.own}),
            # What SQS's own redrive moves says nothing.
            reason=why.reason,
            stage=why.stage,
            attempt=why.attempt,
            enqueued_at=None,
            died_at=_instant(system.get("SentTimestamp")) if why.message_id else None,
            generation="",
            # The queue that SQS itself moved it from, else the word of the letter.
            origin=source.rpartition(":")[2] or why.queue or self._queue.name,
            original_id=why.message_id or raw["MessageId"],
        )


class _Looking:
    """One walk through a queue of dead letters."""

    def __init__(self, dead: Queue, requests: BatchRequests) -> None:
        self._dead = dead
        self._requests = requests
        #: Hidden from others: message id → receipt.
        self._hidden: dict[str, str] = {}
        self._known: set[str] = set()

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """What lies there, each letter once, as SQS hands it out."""
        request = {
            "MaxNumberOfMessages": MAX_BATCH,
            "VisibilityTimeout": _HIDDEN_SECONDS,
            "WaitTimeSeconds": _WAIT_SECONDS,
            "MessageSystemAttributeNames": ["All"],
            "MessageAttributeNames": ["All"],
        }
        while found := self._dead.receive(request):
            self._hidden |= {raw["MessageId"]: raw["ReceiptHandle"] for raw in found}
            fresh = [raw for raw in found if raw["MessageId"] not in self._known]
            self._known |= {raw["MessageId"] for raw in fresh}
            if not fresh:  # it has lasted so long that the first are shown again
                return
            yield fresh

    def gone(self, key: str) -> None:
        """A letter lies there no more."""
        del self._hidden[key]

    def show_again(self) -> None:
        """Show at once what was hidden; if that fails, SQS does so in a while."""
        entries = [
            (key, {"ReceiptHandle": receipt, "VisibilityTimeout": 0})
            for key, receipt in self._hidden.items()
        ]
        with suppress(ProducerError):
            self._requests.send(call_of(self._dead.change), entries)


def _instant(milliseconds: str | None) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(milliseconds or "") / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
