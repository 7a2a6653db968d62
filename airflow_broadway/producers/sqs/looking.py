"""What a queue says of itself: its attributes, its redrive policy, its depth."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody import QueueDepth
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.producers.sqs.client import Queue, open_queue
from airflow_broadway.producers.sqs.errors import Denied

if TYPE_CHECKING:
    from airflow_broadway.core.producer import ProducerEnv
    from airflow_broadway.producers.sqs.producer import SqsProducer

__all__ = ["check", "dead_letter_queue", "depth", "redrive_of"]

log = logging.getLogger(__name__)

#: A release counts as a receive: below this, dead runs alone soon make dead letters.
FEWEST_RECEIVES = 5


def redrive_of(attributes: dict[str, str]) -> dict[str, Any]:
    """The queue's redrive policy; empty if it has none."""
    try:
        policy = json.loads(attributes.get("RedrivePolicy") or "{}")
    except ValueError:
        return {}
    return policy if isinstance(policy, dict) else {}


def dead_letter_queue(producer: SqsProducer, queue: Queue) -> Queue:
    """Where dead letters go: the option's queue, else that of the redrive policy.

    :raises ProducerError: If there is none, or it may not be asked for.
    """
    place = producer.dead_letter or redrive_of(queue.attributes("RedrivePolicy")).get(
        "deadLetterTargetArn"
    )
    if not place:
        raise ProducerError(_NO_DEAD_LETTER.format(queue.name))
    return queue.other(str(place))


_NO_DEAD_LETTER = (
    "there is no queue for dead letters: give the producer dead_letter=…, or the queue {!r} a"
    " redrive policy; until then such messages come back"
)


def check(producer: SqsProducer, queue: Queue) -> None:
    """Look at the queue before anything is received, and say what will go wrong.

    :raises ProducerError: If there is no such queue, or dead letters would have nowhere to go.
    """
    try:
        attributes = queue.attributes("All")
    except Denied:
        log.info(
            "GetQueueAttributes is not allowed on %r: its redrive policy cannot be checked, and"
            " its depth not shown.",
            queue.name,
        )
        return
    policy = redrive_of(attributes)
    most = int(policy.get("maxReceiveCount") or 0)
    if most and most < FEWEST_RECEIVES:
        log.warning(
            "the redrive policy of %r makes a message a dead letter after %d receives: here what a"
            " dead or stopped run gives back counts as one too; set maxReceiveCount to %d or more",
            queue.name,
            most,
            FEWEST_RECEIVES,
        )
    if not policy and producer.dead_letter is None and producer.keeps_payload:
        raise ProducerError(_NO_DEAD_LETTER.format(queue.name))


def depth(producer: SqsProducer, env: ProducerEnv) -> QueueDepth | None:
    """How full the queue is, about; ``None`` if that may not be asked."""
    queue = open_queue(producer, env)
    try:
        try:
            told = queue.attributes("All")
        except Denied:
            return None
        try:
            letters = dead_letter_queue(producer, queue).attributes("All")
        except BroadwayError:  # none, or not to be looked at
            letters = {}
        return QueueDepth(
            ready=int(told.get("ApproximateNumberOfMessages", 0)),
            delayed=int(told.get("ApproximateNumberOfMessagesDelayed", 0)),
            leased=int(told.get("ApproximateNumberOfMessagesNotVisible", 0)),
            dead=int(letters.get("ApproximateNumberOfMessages", 0)),
            oldest_age=None,
        )
    finally:
        queue.close()
