"""Implements the custody engine's port for Pub/Sub: pulls, messages, checks and depth.

Pub/Sub delivers a message with the subscription's own ack deadline, 10 seconds by default.  So each
pull is followed by one ModifyAckDeadline that extends it to the lease.  That request is omitted if
the subscription's deadline is at least as long.

An exactly-once subscription confirms each ack id: transient failures are retried, and permanent
ones make the ack id invalid.  Other subscriptions confirm nothing, so leases end by the clocks of
workers.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Final

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery, QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.engine.port import (
    Answer,
    Broker,
    Contents,
    DeadLetterTarget,
    Denied,
    Hidden,
    Keyed,
    Received,
)
from airflow_broadway.producers.engine.receipts import ReceiptsFolder
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.kit.checks import findings_of_limit
from airflow_broadway.producers.pubsub import dead_letters, limits
from airflow_broadway.producers.pubsub.client import Client, open_client, open_metrics
from airflow_broadway.producers.pubsub.errors import Missing, translated
from airflow_broadway.producers.pubsub.options import PubSubProducer

log = logging.getLogger(__name__)

#: The recommended minimum of max_delivery_attempts: each release of a failed run counts as one.
FEWEST_DELIVERIES: Final = 10
_UNDELIVERED: Final = "num_undelivered_messages"
_OLDEST: Final = "oldest_unacked_message_age"
#: Metrics are sampled every minute, and are visible up to three minutes later.
_LOOK_BACK: Final = timedelta(minutes=10)
_NO_DEAD_LETTER: Final = (
    "there is no topic for dead letters: give the producer dead_letter=…, or the subscription {!r}"
    " a dead-letter policy; until then such messages are redelivered"
)
#: The maximum bytes of ack ids in a request, which also contains the subscription's name, and up to
#: four bytes of encoding per id.
_MOST_BYTES: Final = limits.MAX_REQUEST - 1024 - 4 * limits.MAX_IDS
_NO_PROPERTIES: Final = "{}"


class PubSubBroker(Broker[Client]):
    """One subscription."""

    producer: PubSubProducer
    service: ClassVar[str] = "Pub/Sub"
    queue_word: ClassVar[str] = "Pub/Sub subscription"
    native_attempts: ClassVar[bool] = False
    ordered_groups: ClassVar[bool] = True
    removes_once: ClassVar[bool] = True
    max_hide: ClassVar[int] = limits.LONGEST_DEADLINE
    max_batch: ClassVar[int] = limits.MAX_IDS
    kept_days: ClassVar[int] = limits.KEPT_DAYS

    def __init__(self, producer: PubSubProducer, env: ProducerEnv) -> None:
        super().__init__(producer, env)
        self.max_fetch = producer.max_number_of_messages
        self.concurrency = producer.receive_concurrency
        self.interval = producer.receive_interval
        self.retry_seconds = producer.request_timeout
        #: The subscription's own ack deadline, in seconds.
        self._deadline = 0

    def open(self) -> Client:
        return open_client(self.producer, self.env)

    # -- receiving -----------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        producer, client = self.producer, self.client
        try:
            settings = client.settings()
        except Denied:
            text = (
                f"pubsub.subscriptions.get is not allowed on {client.name!r}: its kind and its"
                " policies cannot be checked, and each pull extends its messages' deadlines"
            )
            return [Finding("note", text)]
        self._deadline = int(settings.ack_deadline_seconds)
        refusal = self._refusal(settings)
        if refusal is None and producer.dead_letter and producer.may_publish(Delivery()):
            try:
                client.has_topic(client.topic(producer.dead_letter))
            except Denied:  # the minimal roles permit publishing only
                pass
            except Missing as error:
                refusal = str(error)
        findings = [Finding("error", refusal)] if refusal else []
        return findings + self._warnings(settings)

    def _refusal(self, settings: Any) -> str | None:
        """Returns the reason why runs cannot use the subscription; ``None`` if they can."""
        producer, name = self.producer, settings.name
        ordered, kind = settings.enable_message_ordering, _kind_of(settings)
        if settings.detached:
            return (
                f"the subscription {name!r} is detached from its topic, and holds nothing any more:"
                " create another one"
            )
        if kind is not None:
            return (
                f"{name!r} is a {kind} subscription: Pub/Sub delivers its messages itself, and none"
                " can be pulled; create a pull subscription next to it"
            )
        if ordered and not producer.message_ordering:
            return (
                f"the subscription {name!r} delivers in order (enable_message_ordering), so that"
                " those behind a redelivered message are redelivered too: give the producer"
                " message_ordering=True"
            )
        if producer.message_ordering and not ordered:
            return (
                f"message_ordering=True needs a subscription that delivers in order, and {name!r}"
                " does not: create one with enable_message_ordering, which cannot be changed later"
            )
        has_place = producer.dead_letter or settings.dead_letter_policy.dead_letter_topic
        if producer.may_publish(Delivery()) and not has_place:
            return _NO_DEAD_LETTER.format(name)
        return None

    def _warnings(self, settings: Any) -> list[Finding]:
        """Returns warnings about a usable subscription."""
        producer, name = self.producer, settings.name
        limit = int(settings.dead_letter_policy.max_delivery_attempts)
        warnings = findings_of_limit(
            producer,
            limit,
            FEWEST_DELIVERIES,
            policy=f"the dead-letter policy of {name!r}",
            counted=pluralize(limit, "delivery", "deliveries"),
            setting="max_delivery_attempts",
        )
        if settings.topic == dead_letters.DELETED:
            text = (
                f"the topic of the subscription {name!r} was deleted: what is left is drained, and"
                " nothing new comes"
            )
            warnings.append(Finding("warning", text))
        least = settings.retry_policy.minimum_backoff
        retries = "retry" in (producer.on_success, producer.on_failure)
        if retries and least and least.total_seconds() > producer.retry.backoff:
            text = (
                f"the retry policy of {name!r} delays redeliveries by"
                f" {least.total_seconds():g} s at least, beyond the delays of the producer's retry"
                f" (backoff {producer.retry.backoff:g} s)"
            )
            warnings.append(Finding("warning", text))
        return warnings

    def receive(self, count: int) -> Answer:
        at = self.clock.now().timestamp()
        ordered = self.producer.message_ordering
        messages = [
            Received(
                raw.message.message_id,
                raw.ack_id,
                raw,
                raw.delivery_attempt,
                (raw.message.ordering_key or None) if ordered else None,
            )
            for raw in self.client.pull(min(count, self.max_fetch), self.producer.receive_timeout)
        ]
        if not messages:
            return Answer(at, messages)
        return Answer(at, messages) if self._deadline >= self.seconds else self._extended(messages)

    def _extended(self, messages: Sequence[Received]) -> Answer:
        """Extends the ack deadlines of pulled messages to the lease; drops expired ones."""
        at = self.clock.now().timestamp()
        requests = BatchRequests(self)
        extended = ((m.receipt, Hidden(m.receipt, self.seconds)) for m in messages)
        refused = requests.send_alone(self.client.hide, extended)
        if self.clock.now().timestamp() >= at + (self._deadline or limits.SHORTEST_DEADLINE):
            # An outage outlasted the ack deadline, and Pub/Sub accepts expired ack ids silently.
            refused = {received.receipt for received in messages}
        if not refused:
            return Answer(at, messages)
        rest, behind = _without(messages, refused)
        requests.send_alone(self.client.hide, ((receipt, Hidden(receipt, 0)) for receipt in behind))
        log.warning(
            "Pub/Sub revoked %d of %d messages on delivery: they are redelivered",
            len(refused),
            len(messages),
        )
        return Answer(at, rest)

    def read(self, received: Received) -> Contents:
        """Parses a message into Broadway's metadata.

        ``deliveryAttempt`` is ``None`` without a dead-letter policy.  ``publishTime`` is ISO 8601
        text, because metadata is JSON.
        """
        raw = received.raw
        message = raw.message
        key = message.ordering_key
        attributes = dict(values) if (values := message.attributes) else {}
        metadata = {
            "attributes": attributes,
            "deliveryAttempt": raw.delivery_attempt or None,
            "messageId": message.message_id,
            "orderingKey": key,
            "publishTime": dead_letters.timestamp_of(message.publish_time),
        }
        properties = _properties(attributes, key) if attributes or key else _NO_PROPERTIES
        return Contents(message.data, metadata, properties, limits.REQUEUED in attributes)

    # -- settling ------------------------------------------------------------------------------

    def dead_letter_target(self) -> DeadLetterTarget:
        publisher = dead_letters.publisher_of(self.client, self._dead_letter_topic())
        return DeadLetterTarget(publisher, partial(dead_letters.letter, subscription=self.name))

    def _dead_letter_topic(self) -> str:
        """Returns the dead-letter topic of the option, else of the dead-letter policy.

        :raises ProducerError: If there is none, or GetSubscription is denied.
        """
        if self.producer.dead_letter is not None:
            return self.client.topic(self.producer.dead_letter)
        topic = self.client.settings().dead_letter_policy.dead_letter_topic
        if not topic:
            raise ProducerError(_NO_DEAD_LETTER.format(self.name))
        return str(topic)

    def requests(self, entries: Iterable[Keyed]) -> Iterator[list[Keyed]]:
        """Divides entries into requests with one deadline each, up to 2,500 ids and 512 KiB."""
        acked: list[Keyed] = []
        by_deadline: dict[int, list[Keyed]] = {}
        for keyed in entries:
            if isinstance(keyed[1], str):
                acked.append(keyed)
            else:
                by_deadline.setdefault(keyed[1].seconds, []).append(keyed)
        yield from _split(acked, [ack_id for _, ack_id in acked])
        for together in by_deadline.values():
            yield from _split(together, [hidden.receipt for _, hidden in together])

    # -- inspecting ----------------------------------------------------------------------------

    def depth(self) -> QueueDepth | None:
        """Returns the depth of the subscription by Cloud Monitoring; ``None`` if it is unknown.

        Delayed retries count as ready.  Leased messages are counted by their receipts.  Dead
        letters belong to another topic, and are not counted.
        """
        client, now = self.client, self.clock.now()
        metrics = open_metrics(self.producer, self.env)
        if metrics is None:
            return None
        try:
            # Both metrics include all unacknowledged messages, leased or not.
            waiting = _newest(metrics, client, _UNDELIVERED, now)
            oldest = _newest(metrics, client, _OLDEST, now)
        except Exception as error:
            reason = translated(error, "ListTimeSeries", client.name, "monitoring.googleapis.com")
            log.info("The depth of %r is not known: %s", client.name, reason)
            return None
        finally:
            metrics.transport.close()
        if waiting is None or oldest is None:
            log.info(
                "The depth of %r is not known: Cloud Monitoring has no new value.", client.name
            )
            return None
        leased = ReceiptsFolder(self).count_held(self.env.generation)
        ready = max(0, waiting - leased)
        return QueueDepth(ready, 0, leased, 0, float(oldest) if ready else None)

    def dead_letters(self, place: str | None) -> DeadLetters:
        return dead_letters.PubSubDeadLetters(self, self._dead_letter_subscription(place))

    def _dead_letter_subscription(self, place: str | None) -> Client:
        """Opens the dead-letter subscription: ``place``, else the option's, else by the topic's id.

        :raises ProducerError: If there is none, or it is not usable.
        """
        name = place or self.producer.dead_letter_subscription
        if name is None:
            name = self._dead_letter_topic().replace("/topics/", "/subscriptions/")
        subscription = self.client.other(name)
        if subscription.name == self.name:
            raise ProducerError(
                f"{self.name!r} is what the pipeline drains: dead letters need a subscription of"
                " their own, on their topic"
            )
        try:
            settings = subscription.settings()
        except Denied:  # the minimal roles permit pulling only
            return subscription
        except Missing as error:
            raise ProducerError(
                f"{error}; dead letters are read from a pull subscription of their topic: make one"
                " of this id, or name yours by dead_letter_subscription or --place"
            ) from error
        kind = "detached" if settings.detached else _kind_of(settings)
        if kind is not None:
            raise ProducerError(
                f"{subscription.name!r} is a {kind} subscription, from which nothing can be pulled:"
                " dead letters need a pull subscription of their topic"
            )
        return subscription


def _kind_of(settings: Any) -> str | None:
    """Returns the kind of a subscription; ``None`` for a pull subscription."""
    kinds = {
        "push": settings.push_config.push_endpoint,
        "BigQuery": settings.bigquery_config.table,
        "Cloud Storage": settings.cloud_storage_config.bucket,
        # Older clients do not support Bigtable.
        "Bigtable": getattr(getattr(settings, "bigtable_config", None), "table", ""),
    }
    return next((kind for kind, target in kinds.items() if target), None)


def _newest(metrics: Any, client: Client, metric: str, now: datetime) -> int | None:
    """Returns the newest value of a subscription's metric; ``None`` if there is none.

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
    points = [point for metric in series for point in metric.points]
    newest = max(points, key=lambda point: point.interval.end_time, default=None)
    return None if newest is None else int(newest.value.int64_value)


def _split(entries: list[Keyed], ids: Iterable[str]) -> Iterator[list[Keyed]]:
    """Divides entries of one kind into requests of the maximum size."""
    # Cumulative bytes before each entry, for a binary search.
    before = [0, *accumulate(map(len, map(str.encode, ids)))]
    start = 0
    while start < len(entries):
        limit = min(start + limits.MAX_IDS, len(entries))
        end = bisect_right(before, before[start] + _MOST_BYTES, start, limit + 1) - 1
        end = max(end, start + 1)
        yield entries[start:end]
        start = end


def _without(
    messages: Sequence[Received], refused: Collection[str]
) -> tuple[list[Received], list[str]]:
    """Removes expired messages; returns the rest, and receipts that follow in an ordering key."""
    rest: list[Received] = []
    behind: list[str] = []
    keys: set[str] = set()
    for received in messages:
        if received.receipt in refused:
            keys.update([received.group] if received.group else [])
        elif received.group in keys:
            behind.append(received.receipt)
        else:
            rest.append(received)
    return rest, behind


def _properties(attributes: dict[str, str], key: str) -> str:
    """Returns the properties that a dead letter of the message keeps, as JSON text."""
    properties: dict[str, Any] = {}
    if attributes:
        properties["attributes"] = attributes
    if key:
        properties["ordering_key"] = key
    return json.dumps(properties, separators=(",", ":"))
