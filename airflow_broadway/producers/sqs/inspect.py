"""What a queue says of itself: its attributes, its redrive policy, its depth."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody.protocol import Delivery, QueueDepth
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.sqs.client import Queue, open_queue
from airflow_broadway.producers.sqs.errors import Denied
from airflow_broadway.producers.sqs.limits import IN_FLIGHT

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["check", "dead_letter_queue", "depth", "look_at_empty", "max_receives"]

log = logging.getLogger(__name__)

#: A release counts as a receive: below this, dead runs alone soon make dead letters.
FEWEST_RECEIVES = 5
#: Seconds by which this machine's clock may differ from SQS's before that is logged.
SKEW = 60.0


def _redrive_of(attributes: dict[str, str]) -> dict[str, Any]:
    """The queue's redrive policy; empty if it has none."""
    try:
        policy = json.loads(attributes.get("RedrivePolicy") or "{}")
    except ValueError:
        return {}
    return policy if isinstance(policy, dict) else {}


def max_receives(queue: Queue) -> int | None:
    """The receives after which SQS moves a message to another queue; ``None``: no limit.

    :raises Denied: If that may not be asked for.
    """
    return int(_redrive_of(queue.attributes("RedrivePolicy")).get("maxReceiveCount") or 0) or None


def dead_letter_queue(producer: SqsOptions, queue: Queue) -> Queue:
    """Where dead letters go: the option's queue, else that of the redrive policy.

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


def check(producer: SqsOptions, queue: Queue, clock: Clock) -> None:
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
    _compare_clocks(queue, clock)
    policy = _redrive_of(attributes)
    most = int(policy.get("maxReceiveCount") or 0)
    retries = "retry" in (producer.on_success, producer.on_failure)
    fewest = max(FEWEST_RECEIVES, producer.retry.max_attempts) if retries else FEWEST_RECEIVES
    if most and most < fewest:
        log.warning(
            "the redrive policy of %r makes a message a dead letter after %s%s: here what a dead or"
            " stopped run gives back counts as one too; set maxReceiveCount to %d or more",
            queue.name,
            many(most, "receive"),
            f", before its {many(producer.retry.max_attempts, 'attempt')} are used up"
            if retries and most < producer.retry.max_attempts
            else "",
            fewest,
        )
    if not policy and producer.dead_letter is None and producer.may_publish(Delivery()):
        raise ProducerError(_NO_DEAD_LETTER.format(queue.name))


def _compare_clocks(queue: Queue, clock: Clock) -> None:
    """Leases end by our own clocks, on several machines: one that is wrong is logged."""
    if queue.answered_at is None:
        return
    ahead = (clock.now() - queue.answered_at).total_seconds()
    if abs(ahead) > SKEW:
        log.warning(
            "this machine's clock is %.0f s %s SQS's: leases end by the clocks of workers, so that"
            " one that differs settles too late or too early; set the clock (NTP)",
            abs(ahead),
            "ahead of" if ahead > 0 else "behind",
        )


def look_at_empty(producer: SqsOptions, queue: Queue) -> None:
    """Say why a receive was empty, if it was not because the queue is.

    With long polling, and of FIFO queues, SQS does not say that a queue has as many messages in
    flight as it may have: it looks empty.
    """
    try:
        attributes = queue.attributes("All")
    except BroadwayError:  # may be denied, and nothing depends on it
        return
    visible = int(attributes.get("ApproximateNumberOfMessages", 0))
    hidden = int(attributes.get("ApproximateNumberOfMessagesNotVisible", 0))
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


def depth(producer: SqsOptions, env: ProducerEnv) -> QueueDepth | None:
    """How full the queue is, about; ``None`` if that may not be asked."""
    queue = open_queue(producer, env)
    try:
        try:
            attributes = queue.attributes("All")
        except Denied as error:
            log.info("The depth of %r is not known: %s", queue.name, error)
            return None
        try:
            letters = dead_letter_queue(producer, queue).attributes("All")
        except BroadwayError:  # none, or not to be looked at
            letters = {}
        return QueueDepth(
            ready=int(attributes.get("ApproximateNumberOfMessages", 0)),
            delayed=int(attributes.get("ApproximateNumberOfMessagesDelayed", 0)),
            leased=int(attributes.get("ApproximateNumberOfMessagesNotVisible", 0)),
            dead=int(letters.get("ApproximateNumberOfMessages", 0)),
            oldest_age=None,
        )
    finally:
        queue.close()
