"""Checks a subscription, reports its depth, and serves its dead letters.

Cloud Monitoring alone knows the depth, some minutes late.

A topic shows nothing: dead letters are read from a pull subscription of it, and each look counts as
a delivery.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from airflow_broadway.core.custody.dead_letters import DeadLetter
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.protocol import Delivery, QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.engine.letters import EngineDeadLetters
from airflow_broadway.producers.engine.port import (
    Broker,
    DeadLetterTarget,
    Hidden,
    Publisher,
    Received,
)
from airflow_broadway.producers.engine.receipts import ReceiptsFolder
from airflow_broadway.producers.pubsub import dead_letters
from airflow_broadway.producers.pubsub.client import Client, open_metrics
from airflow_broadway.producers.pubsub.errors import Denied, Missing, translated
from airflow_broadway.producers.pubsub.limits import MAX_PUBLISH, MAX_PULL
from airflow_broadway.producers.pubsub.options import PubSubProducer

log = logging.getLogger(__name__)

#: A release counts as a delivery: below this, dead runs alone soon make dead letters.
FEWEST_DELIVERIES: Final = 10
_UNDELIVERED: Final = "num_undelivered_messages"
_OLDEST: Final = "oldest_unacked_message_age"
#: Values are a minute apart, and come up to three minutes late.
_LOOK_BACK: Final = timedelta(minutes=10)
#: What stands for a topic that was deleted.
_DELETED: Final = "_deleted-topic_"
_NO_DEAD_LETTER: Final = (
    "there is no topic for dead letters: give the producer dead_letter=…, or the subscription {!r}"
    " a dead-letter policy; until then such messages come back"
)


def check(producer: PubSubProducer, client: Client) -> tuple[list[Finding], int]:
    """Checks the subscription's kind and policies, and the topic for dead letters.

    :returns: The findings, and the subscription's own ack deadline in seconds; 0 if that is denied.
    :raises ProducerError: If there is no such subscription.
    """
    try:
        settings = client.settings()
    except Denied:
        text = (
            f"pubsub.subscriptions.get is not allowed on {client.name!r}: its kind and its policies"
            " cannot be checked, and each pull extends its messages' deadlines"
        )
        return [Finding("note", text)], 0
    findings = [Finding("warning", text) for text in _warnings(producer, settings)]
    refusal = _refusal(producer, settings)
    if refusal is None and producer.dead_letter and producer.may_publish(Delivery()):
        try:
            client.has_topic(client.topic(producer.dead_letter))
        except Denied:  # the least roles may publish, and not look
            pass
        except Missing as error:
            refusal = str(error)
    refused = [Finding("error", refusal)] if refusal else []
    return [*refused, *findings], int(settings.ack_deadline_seconds)


def _refusal(producer: PubSubProducer, settings: Any) -> str | None:
    """Returns why no run can pull from the subscription, or settle; ``None``: it can."""
    name = settings.name
    if settings.detached:
        return (
            f"the subscription {name!r} is detached from its topic, and holds nothing any more:"
            " create another one"
        )
    kind = _kind_of(settings)
    if kind is not None:
        return (
            f"{name!r} is a {kind} subscription: Pub/Sub delivers its messages itself, and none can"
            " be pulled; create a pull subscription beside it"
        )
    if settings.enable_message_ordering and not producer.message_ordering:
        return (
            f"the subscription {name!r} delivers in order (enable_message_ordering), where one that"
            " comes again brings those behind it again: give the producer message_ordering=True"
        )
    if producer.message_ordering and not settings.enable_message_ordering:
        return (
            f"message_ordering=True needs a subscription that delivers in order, and {name!r} does"
            " not: create one with enable_message_ordering, which cannot be changed later"
        )
    has_policy = bool(settings.dead_letter_policy.dead_letter_topic)
    if not has_policy and producer.dead_letter is None and producer.may_publish(Delivery()):
        return _NO_DEAD_LETTER.format(name)
    return None


def _kind_of(settings: Any) -> str | None:
    """Returns the kind of a subscription that is no pull subscription."""
    kinds = {
        "push": settings.push_config.push_endpoint,
        "BigQuery": settings.bigquery_config.table,
        "Cloud Storage": settings.cloud_storage_config.bucket,
        # Older clients do not know it.
        "Bigtable": getattr(getattr(settings, "bigtable_config", None), "table", ""),
    }
    return next((kind for kind, target in kinds.items() if target), None)


def _warnings(producer: PubSubProducer, settings: Any) -> list[str]:
    """Returns warnings about a subscription that runs can pull from."""
    found = []
    name = settings.name
    if settings.topic == _DELETED:
        found.append(
            f"the topic of the subscription {name!r} was deleted: what is left is drained, and"
            " nothing new comes"
        )
    most = int(settings.dead_letter_policy.max_delivery_attempts)
    retries = "retry" in (producer.on_success, producer.on_failure)
    attempts = producer.retry.max_attempts if retries else 0
    if most and most < max(FEWEST_DELIVERIES, attempts):
        early = f", before its {many(attempts, 'attempt')} are used up" if most < attempts else ""
        found.append(
            f"the dead-letter policy of {name!r} makes a message a dead letter after"
            f" {many(most, 'delivery', 'deliveries')}{early}: here what a dead or stopped run gives"
            f" back counts as one too; set max_delivery_attempts to"
            f" {max(FEWEST_DELIVERIES, attempts)} or more"
        )
    least = settings.retry_policy.minimum_backoff
    if retries and least and least.total_seconds() > producer.retry.backoff:
        found.append(
            f"the retry policy of {name!r} puts off what comes again by {least.total_seconds():g} s"
            f" at least, beyond the delays of the producer's retry (backoff"
            f" {producer.retry.backoff:g} s)"
        )
    return found


def dead_letter_topic(producer: PubSubProducer, client: Client) -> str:
    """Returns the topic for dead letters: the option's, else that of the dead-letter policy.

    :raises ProducerError: If there is none, or it may not be asked for.
    """
    if producer.dead_letter is not None:
        return client.topic(producer.dead_letter)
    topic = client.settings().dead_letter_policy.dead_letter_topic
    if not topic:
        raise ProducerError(_NO_DEAD_LETTER.format(client.name))
    return str(topic)


def letters_subscription(producer: PubSubProducer, client: Client, place: str | None) -> Client:
    """Opens the subscription of dead letters: ``place``, else the option's, else that of the
    topic's id.

    :raises ProducerError: If there is none, or it cannot be the one.
    """
    named = place or producer.dead_letter_subscription
    if named is None:
        named = dead_letter_topic(producer, client).replace("/topics/", "/subscriptions/")
    found = client.other(named)
    if found.name == client.name:
        raise ProducerError(
            f"{client.name!r} is what the pipeline drains: dead letters need a subscription of"
            " their own, on their topic"
        )
    try:
        settings = found.settings()
    except Denied:  # the least roles may pull, and not look
        return found
    except Missing as error:
        raise ProducerError(
            f"{error}; dead letters are read from a pull subscription of their topic: make one of"
            " this id, or name yours by dead_letter_subscription or --place"
        ) from error
    kind = "detached" if settings.detached else _kind_of(settings)
    if kind is not None:
        raise ProducerError(
            f"{found.name!r} is a {kind} subscription, from which nothing can be pulled: dead"
            " letters need a pull subscription of their topic"
        )
    return found


# -- depth -----------------------------------------------------------------------------------------


def depth(producer: PubSubProducer, broker: Broker[Client]) -> QueueDepth | None:
    """Returns how full the subscription is, by Cloud Monitoring; ``None``: that is not known.

    Messages that wait for a retry's delay count as ready.  Those that runs hold are known from
    their receipts.  Dead letters are messages of another topic, and are not counted.
    """
    client = broker.client
    metrics = open_metrics(producer, broker.env)
    if metrics is None:
        return None
    try:
        # Both are of all that is not acknowledged, held or not.
        waiting = _newest(metrics, client, _UNDELIVERED, broker.clock.now())
        oldest = _newest(metrics, client, _OLDEST, broker.clock.now())
    except Exception as error:
        why = translated(error, "ListTimeSeries", client.name, "monitoring.googleapis.com")
        log.info("The depth of %r is not known: %s", client.name, why)
        return None
    finally:
        metrics.transport.close()
    if waiting is None or oldest is None:
        log.info("The depth of %r is not known: Cloud Monitoring has no new value.", client.name)
        return None
    leased = ReceiptsFolder(broker).count_held(broker.env.generation)
    ready = max(0, waiting - leased)
    return QueueDepth(ready, 0, leased, 0, float(oldest) if ready else None)


def _newest(metrics: Any, client: Client, metric: str, now: datetime) -> int | None:
    """Returns the newest value of a metric of a subscription; ``None``: there is none.

    :param metrics: A ``MetricServiceClient``.
    """
    _, project, _, name = client.name.split("/")
    series = metrics.list_time_series(
        request={
            "name": f"projects/{project}",
            "filter": f'metric.type = "pubsub.googleapis.com/subscription/{metric}"'
            f' AND resource.labels.subscription_id = "{name}"',
            "interval": {"start_time": now - _LOOK_BACK, "end_time": now},
        },
        retry=None,
        timeout=client.timeout,
    )
    points = [point for each in series for point in each.points]
    newest = max(points, key=lambda point: point.interval.end_time, default=None)
    return None if newest is None else int(newest.value.int64_value)


# -- dead letters ----------------------------------------------------------------------------------


def dead_letter_target(producer: PubSubProducer, client: Client) -> DeadLetterTarget:
    """Opens the topic for dead letters.

    :raises ProducerError: If there is none.
    """
    make = partial(dead_letters.letter, subscription=client.name)
    return DeadLetterTarget(publisher_of(client, dead_letter_topic(producer, client)), make)


def publisher_of(client: Client, topic: str) -> Publisher:
    """Publishes messages to a topic."""
    return Publisher(
        partial(client.publish, topic),
        "Publish",
        dead_letters.size_of,
        MAX_PUBLISH,
        dead_letters.ROOM,
    )


class PubSubDeadLetters(EngineDeadLetters):
    """The letters that one subscription shows.

    :param client: The subscription that the pipeline drains.
    :param dead: The subscription of the topic for dead letters.
    :param wait: Seconds that a pull waits: one that finds nothing is the end.
    """

    def __init__(self, source: Broker[Any], client: Client, dead: Client, wait: float) -> None:
        super().__init__(source, dead, f"subscription {dead.name!r}")
        self._client = client
        self._dead = dead
        self._wait = wait

    def fetch(self) -> list[Received]:
        while found := self._dead.pull(MAX_PULL, self._wait):
            received = [
                Received(raw.message.message_id, raw.ack_id, raw, raw.delivery_attempt)
                for raw in found
            ]
            hidden = ((each.key, Hidden(each.receipt, self.hidden_seconds)) for each in received)
            gone = self.requests.send(self._dead.hide, hidden)
            if kept := [each for each in received if each.key not in gone]:
                return kept
        return []

    def limit(self) -> tuple[int | None, str]:
        try:
            policy = self._dead.settings().dead_letter_policy
        except Denied:  # what Pub/Sub then moves goes to yet another topic, and is not deleted
            return None, "max_delivery_attempts"
        limit = int(policy.max_delivery_attempts) if policy.dead_letter_topic else None
        return limit, "max_delivery_attempts"

    def publisher(self, name: str) -> Publisher:
        topic = str(self._client.other(name).settings().topic)
        if topic == _DELETED:
            raise ProducerError(f"the topic of the subscription {name!r} was deleted")
        return publisher_of(self._client, topic)

    def back(self, letter: DeadLetter, received: Received, to: str) -> dict[str, Any]:
        return dead_letters.sent_back(received.raw.message, letter.original_id)

    def letter(self, received: Received) -> DeadLetter:
        return dead_letters.letter_of(received.raw.message, self._client.name)
