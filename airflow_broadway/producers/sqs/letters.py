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

from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, Moved, Moving
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.producers.kit.receipts.batch_requests import BatchRequests
from airflow_broadway.producers.sqs import dead_letters
from airflow_broadway.producers.sqs.batch_requests import batch_requests, call_of
from airflow_broadway.producers.sqs.client import Queue, open_queue
from airflow_broadway.producers.sqs.inspect import dead_letter_queue
from airflow_broadway.producers.sqs.limits import MAX_BATCH
from airflow_broadway.producers.sqs.reading import as_json

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["SqsDeadLetters"]

#: Seconds for which letters are hidden while they are looked at.
_HIDDEN_SECONDS: Final = 300
#: Seconds that a receive waits, for SQS to ask all of its servers: an empty answer is the end.
_WAIT_SECONDS = 1


class SqsDeadLetters:
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
        self._origins: dict[str, Queue] = {self._queue.name: self._queue}

    @property
    def place(self) -> str:
        return f"queue {self._dead.name!r}"

    def count(self) -> int:
        """About: SQS counts messages so; those that somebody looks at are counted too."""
        attributes = self._dead.attributes("All")
        names = ("", "NotVisible", "Delayed")
        return sum(int(attributes.get(f"ApproximateNumberOfMessages{name}", 0)) for name in names)

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        looking = _Looking(self._dead)
        try:
            for batch in looking.batches():
                for raw in batch:
                    letter = self._letter(raw)
                    if choice.takes(letter):
                        yield letter
        finally:
            looking.show_again(self._requests)

    def requeue(self, choice: Choice = EVERY) -> Moved:
        return self._moved(choice, send=True)

    def delete(self, choice: Choice = EVERY) -> Moved:
        return self._moved(choice, send=False)

    def close(self) -> None:
        self._requests.close()
        self._queue.close()

    # -- moving --------------------------------------------------------------------------------

    def _moved(self, choice: Choice, *, send: bool) -> Moved:
        looking, moving = _Looking(self._dead), Moving(choice)
        try:
            for batch in looking.batches():
                chosen = [
                    (letter, raw)
                    for letter, raw in ((self._letter(raw), raw) for raw in batch)
                    if moving.takes(letter)
                ]
                if send:
                    chosen = self._sent(chosen, moving)
                self._deleted(chosen, looking, moving)
        finally:
            looking.show_again(self._requests)
        return moving.result()

    def _sent(
        self, chosen: Sequence[tuple[DeadLetter, Any]], moving: Moving
    ) -> list[tuple[DeadLetter, Any]]:
        """Send them back, each where it came from; those that SQS has taken."""
        by_origin: dict[str, dict[str, dict[str, Any]]] = {}
        for letter, raw in chosen:
            try:
                target = self._origin(letter.origin)
            except BroadwayError as error:
                moving.refused[letter.message_id] = str(error)
                continue
            why = dead_letters.why_of(raw.get("MessageAttributes") or {})
            by_origin.setdefault(letter.origin, {})[raw["MessageId"]] = dead_letters.sent_back(
                raw, why, letter.message_id, fifo=target.url.endswith(".fifo")
            )
        refused: dict[str, str] = {}
        for origin, entries in by_origin.items():
            requests = dead_letters.requests(entries)
            answers = self._requests.send_requests(call_of(self._origin(origin).send), requests)
            refused |= {key: f"{each.code}: {each.text}" for key, each in answers.items()}
        done = []
        for letter, raw in chosen:
            why_not = refused.get(raw["MessageId"])
            if why_not is not None:
                moving.refused[letter.message_id] = why_not
            elif letter.message_id not in moving.refused:
                done.append((letter, raw))
        return done

    def _deleted(
        self, chosen: Sequence[tuple[DeadLetter, Any]], looking: _Looking, moving: Moving
    ) -> None:
        refused = self._requests.send(
            call_of(self._dead.delete),
            ((raw["MessageId"], {"ReceiptHandle": raw["ReceiptHandle"]}) for _, raw in chosen),
        )
        for letter, raw in chosen:
            key = raw["MessageId"]
            if key in refused:
                moving.refused[letter.message_id] = f"{refused[key].code}: {refused[key].text}"
            else:
                looking.gone(key)
                moving.count += 1

    def _origin(self, name: str) -> Queue:
        if name not in self._origins:
            self._origins[name] = self._queue.other(name)
        return self._origins[name]

    # -- one letter ----------------------------------------------------------------------------

    def _letter(self, raw: Mapping[str, Any]) -> DeadLetter:
        why = dead_letters.why_of(raw.get("MessageAttributes") or {})
        system: Mapping[str, str] = raw.get("Attributes") or {}
        return DeadLetter(
            message_id=why.message_id or raw["MessageId"],
            body=raw["Body"].encode("utf-8", "surrogatepass"),
            properties=as_json({**raw, "MessageAttributes": why.own}),
            # What SQS's own redrive moves says nothing.
            reason=why.reason,
            stage=why.stage,
            attempt=why.attempt,
            enqueued_at=None,
            died_at=_instant(system.get("SentTimestamp")) if why.message_id else None,
            generation="",
            origin=why.queue or self._queue.name,
        )


class _Looking:
    """One walk through a queue of dead letters."""

    def __init__(self, dead: Queue) -> None:
        self._dead = dead
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

    def show_again(self, requests: BatchRequests) -> None:
        """Show at once what was hidden; if that fails, SQS does so in a while."""
        entries = [
            (key, {"ReceiptHandle": receipt, "VisibilityTimeout": 0})
            for key, receipt in self._hidden.items()
        ]
        with suppress(ProducerError):
            requests.send(call_of(self._dead.change), entries)


def _instant(milliseconds: str | None) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(milliseconds or "") / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
