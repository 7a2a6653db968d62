"""Reads a queue's attributes: checks, depth, and its dead letters.

SQS shows a message only by receiving it, so that each look at dead letters counts as a receive.  Of
a FIFO queue it shows only the first few of each message group until these are deleted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from airflow_broadway.core.custody.dead_letters import DeadLetter
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.protocol import Delivery, QueueDepth
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.engine.letters import EngineDeadLetters
from airflow_broadway.producers.engine.port import (
    Broker,
    DeadLetterTarget,
    Publisher,
    Received,
)
from airflow_broadway.producers.sqs import dead_letters
from airflow_broadway.producers.sqs.client import Queue
from airflow_broadway.producers.sqs.errors import Denied
from airflow_broadway.producers.sqs.limits import (
    IN_FLIGHT,
    MAX_BATCH,
    MAX_BODY,
    MAX_BODY_FORMERLY,
)
from airflow_broadway.producers.sqs.options import SqsProducer

log = logging.getLogger(__name__)

#: A release counts as a receive: below this, dead runs alone soon make dead letters.
FEWEST_RECEIVES = 5
#: Seconds that a receive of dead letters waits, for SQS to query all of its servers.  An empty
#: answer is the end.
_WAIT_SECONDS = 1


def _redrive_of(attributes: dict[str, str]) -> dict[str, Any]:
    """Returns the redrive policy; empty if there is none."""
    try:
        policy = json.loads(attributes.get("RedrivePolicy") or "{}")
    except ValueError:
        return {}
    return policy if isinstance(policy, dict) else {}


def dead_letter_queue(producer: SqsProducer, queue: Queue) -> Queue:
    """Opens the queue for dead letters: the option's, else that of the redrive policy.

    :raises ProducerError: If there is none, or it may not be asked for.
    """
    place = producer.dead_letter or _redrive_of(queue.attributes("RedrivePolicy")).get(
        "deadLetterTargetArn"
    )
    if not place:
        raise ProducerError(_NO_DEAD_LETTER.format(queue.name))
    return queue.other(str(place))


_NO_DEAD_LETTER = (
    "there is no queue for dead letters: give the producer dead_letter=…, or the queue {!r} a"
    " redrive policy; until then such messages come back"
)


def check(producer: SqsProducer, queue: Queue) -> Iterator[Finding]:
    """Checks the queue's redrive policy, and the queue for dead letters.

    :raises ProducerError: If there is no such queue.
    """
    try:
        attributes = queue.attributes("All")
    except Denied:
        yield Finding(
            "note",
            f"GetQueueAttributes is not allowed on {queue.name!r}: its redrive policy cannot be"
            " checked, and its depth not shown",
        )
        return
    policy = _redrive_of(attributes)
    most = int(policy.get("maxReceiveCount") or 0)
    retries = "retry" in (producer.on_success, producer.on_failure)
    fewest = max(FEWEST_RECEIVES, producer.retry.max_attempts) if retries else FEWEST_RECEIVES
    if most and most < fewest:
        attempts = producer.retry.max_attempts
        early = f", before its {many(attempts, 'attempt')} are used up" if most < attempts else ""
        yield Finding(
            "warning",
            f"the redrive policy of {queue.name!r} makes a message a dead letter after"
            f" {many(most, 'receive')}{early if retries else ''}: what a dead or stopped run"
            f" releases counts as one too; set maxReceiveCount to {fewest} or more",
        )
    if not policy and producer.dead_letter is None and producer.may_publish(Delivery()):
        yield Finding("error", _NO_DEAD_LETTER.format(queue.name))


def explain_empty(producer: SqsProducer, queue: Queue) -> None:
    """Logs why a receive was empty though the queue is not.

    With long polling, and of FIFO queues, SQS does not say that a queue has as many messages in
    flight as it may have: it looks empty.
    """
    try:
        attributes = queue.attributes("All")
    except BroadwayError:  # may be denied, and nothing depends on it
        return
    visible, hidden = _count(attributes), _count(attributes, "NotVisible")
    if not visible:
        return
    if hidden >= IN_FLIGHT:
        log.error(
            "the SQS queue %r looks empty because it has as many messages in flight as it may have"
            " (about %d of %d): about %d more wait until runs settle what they hold",
            queue.name,
            hidden,
            IN_FLIGHT,
            visible,
        )
    elif producer.fifo and hidden:
        log.warning(
            "about %s of the FIFO queue %r waiting behind about %d in flight of the same groups, to"
            " come when these are settled",
            many(visible, "message"),
            queue.name,
            hidden,
        )


def depth(producer: SqsProducer, queue: Queue) -> QueueDepth | None:
    """Returns how full the queue is, about; ``None`` if that is denied."""
    try:
        attributes = queue.attributes("All")
    except Denied as error:
        log.info("The depth of %r is not known: %s", queue.name, error)
        return None
    try:
        letters = dead_letter_queue(producer, queue).attributes("All")
    except BroadwayError:  # none, or denied
        letters = {}
    return QueueDepth(
        ready=_count(attributes),
        delayed=_count(attributes, "Delayed"),
        leased=_count(attributes, "NotVisible"),
        dead=_count(letters),
        oldest_age=None,
    )


def _count(attributes: Mapping[str, str], which: str = "") -> int:
    return int(attributes.get(f"ApproximateNumberOfMessages{which}", 0))


# -- dead letters ----------------------------------------------------------------------------------


def dead_letter_target(producer: SqsProducer, queue: Queue) -> DeadLetterTarget:
    """Opens the queue for dead letters.

    :raises ProducerError: If there is none.
    """
    target = dead_letter_queue(producer, queue)
    try:
        most = target.attributes("MaximumMessageSize").get("MaximumMessageSize")
    except BroadwayError:  # may be denied, and is not needed
        most = None
    make = partial(
        dead_letters.letter,
        queue=queue.name,
        fifo=target.url.endswith(".fifo"),
        max_bytes=int(most or MAX_BODY),
    )
    return DeadLetterTarget(publisher_of(target), make)


def publisher_of(queue: Queue) -> Publisher:
    """Sends messages to a queue."""
    return Publisher(queue.send, "SendMessage", dead_letters.size_of, MAX_BATCH, MAX_BODY_FORMERLY)


class SqsDeadLetters(EngineDeadLetters):
    """The letters in one queue.

    :param queue: The queue that the pipeline drains.
    :param dead: The queue for dead letters.
    """

    def __init__(self, source: Broker[Any], queue: Queue, dead: Queue) -> None:
        super().__init__(source, dead, f"queue {dead.name!r}")
        self._queue = queue
        self._dead = dead

    def count(self) -> int:
        """Counts about, as SQS does, with letters that are hidden while they are listed."""
        attributes = self._dead.attributes("All")
        return sum(_count(attributes, which) for which in ("", "NotVisible", "Delayed"))

    def fetch(self) -> list[Received]:
        request = {
            "MaxNumberOfMessages": MAX_BATCH,
            "VisibilityTimeout": self.hidden_seconds,
            "WaitTimeSeconds": _WAIT_SECONDS,
            "MessageSystemAttributeNames": ["All"],
            "MessageAttributeNames": ["All"],
        }
        return [
            Received(raw["MessageId"], raw["ReceiptHandle"], raw, dead_letters.receives_of(raw))
            for raw in self._dead.receive(request)
        ]

    def limit(self) -> tuple[int | None, str]:
        try:
            policy = _redrive_of(self._dead.attributes("RedrivePolicy"))
        except Denied:  # what SQS then moves goes to yet another queue, and is not deleted
            policy = {}
        return int(policy.get("maxReceiveCount") or 0) or None, "maxReceiveCount"

    def publisher(self, name: str) -> Publisher:
        return publisher_of(self._queue if name == self._queue.name else self._queue.other(name))

    def back(self, letter: DeadLetter, received: Received, to: str) -> dict[str, Any]:
        fifo = to.endswith(".fifo")
        return dead_letters.sent_back(received.raw, letter.original_id, fifo=fifo)

    def letter(self, received: Received) -> DeadLetter:
        return dead_letters.letter_of(received.raw, self._queue.name)
