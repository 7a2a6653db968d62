"""Implements the port of the custody engine for Pub/Sub: pulls, messages, and requests of ack ids.

Pub/Sub delivers a message for the subscription's own ack deadline, 10 seconds by default.  So each
pull is followed by one request that extends it to the lease; where the subscription's deadline is
as long, that request is omitted.

An exactly-once subscription confirms each ack id: a transient refusal is sent again, after a
permanent one the id is void.  Any other subscription confirms nothing: that is why leases end by
the clocks of workers.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.engine.port import (
    Answer,
    Broker,
    Contents,
    DeadLetterTarget,
    Hidden,
    Keyed,
    Received,
)
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.pubsub import admin
from airflow_broadway.producers.pubsub.client import Client, open_client
from airflow_broadway.producers.pubsub.dead_letters import timestamp_of
from airflow_broadway.producers.pubsub.errors import Expired
from airflow_broadway.producers.pubsub.limits import (
    KEPT_DAYS,
    LONGEST_DEADLINE,
    MAX_IDS,
    MAX_REQUEST,
    REQUEUED,
    SHORTEST_DEADLINE,
)
from airflow_broadway.producers.pubsub.options import PubSubProducer

log = logging.getLogger(__name__)

#: Bytes of ids in a request: it has the subscription's name and two lengths beside them, and four
#: bytes with each, at most.
_MOST_BYTES: Final = MAX_REQUEST - 1024 - 4 * MAX_IDS
_NO_PROPERTIES: Final = "{}"


class PubSubBroker(Broker[Client]):
    """One subscription."""

    service: ClassVar[str] = "Pub/Sub"
    queue_word: ClassVar[str] = "Pub/Sub subscription"
    native_attempts: ClassVar[bool] = False
    ordered_groups: ClassVar[bool] = True
    removes_once: ClassVar[bool] = True
    max_hide: ClassVar[int] = LONGEST_DEADLINE
    max_batch: ClassVar[int] = MAX_IDS
    kept_days: ClassVar[int] = KEPT_DAYS
    ends: ClassVar[tuple[type[ProducerError], ...]] = (Expired,)

    def __init__(self, producer: PubSubProducer, env: ProducerEnv) -> None:
        super().__init__(producer, env)
        self._producer = producer
        self.max_fetch = producer.max_number_of_messages
        self.concurrency = producer.receive_concurrency
        self.interval = producer.receive_interval
        self.retry_seconds = producer.request_timeout
        #: The subscription's own ack deadline, in seconds.
        self._deadline = 0

    def open(self) -> Client:
        return open_client(self._producer, self.env)

    @property
    def place(self) -> str:
        return self._producer.place

    # -- receiving -----------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        findings, self._deadline = admin.check(self._producer, self.client)
        return findings

    def receive(self, count: int) -> Answer:
        at = self.clock.now().timestamp()
        ordered = self._producer.message_ordering
        messages = [
            Received(
                raw.message.message_id,
                raw.ack_id,
                raw,
                raw.delivery_attempt,
                (raw.message.ordering_key or None) if ordered else None,
            )
            for raw in self.client.pull(min(count, self.max_fetch), self._producer.receive_timeout)
        ]
        if not messages:
            return Answer(at, messages)
        return Answer(at, messages) if self._deadline >= self.seconds else self._extended(messages)

    def _extended(self, messages: Sequence[Received]) -> Answer:
        """Extends what was pulled to the lease from now on; drops what has expired already."""
        at = self.clock.now().timestamp()
        requests = BatchRequests(self)
        extended = ((m.receipt, Hidden(m.receipt, self.seconds)) for m in messages)
        gone = requests.send_alone(self.hide, extended)
        if self.clock.now().timestamp() >= at + (self._deadline or SHORTEST_DEADLINE):
            # An outage outlasted Pub/Sub's own deadline, and it accepts an old id without a word.
            gone = {received.receipt for received in messages}
        if not gone:
            return Answer(at, messages)
        kept, behind = _without(messages, gone)
        requests.send_alone(self.hide, ((receipt, Hidden(receipt, 0)) for receipt in behind))
        log.warning(
            "Pub/Sub took back %d of %d messages as they came: they come again",
            len(gone),
            len(messages),
        )
        return Answer(at, kept)

    def read(self, received: Received) -> Contents:
        """Reads a message, with Broadway's metadata under its names.

        ``deliveryAttempt`` is ``None`` without a dead-letter policy; ``publishTime`` is ISO 8601
        text, for metadata is JSON.
        """
        raw = received.raw
        message = raw.message
        key = message.ordering_key
        attributes = dict(found) if (found := message.attributes) else {}
        metadata = {
            "attributes": attributes,
            "deliveryAttempt": raw.delivery_attempt or None,
            "messageId": message.message_id,
            "orderingKey": key,
            "publishTime": timestamp_of(message.publish_time),
        }
        properties = _properties(attributes, key) if attributes or key else _NO_PROPERTIES
        return Contents(message.data, metadata, properties, REQUEUED in attributes)

    # -- settling ------------------------------------------------------------------------------

    def dead_letter_target(self) -> DeadLetterTarget:
        return admin.dead_letter_target(self._producer, self.client)

    def requests(self, entries: Iterable[Keyed]) -> Iterator[list[Keyed]]:
        """Divides entries into requests of one deadline, at most 2,500 ids and 512 KiB each."""
        acked: list[Keyed] = []
        by_deadline: dict[int, list[Keyed]] = {}
        for keyed in entries:
            if isinstance(keyed[1], str):
                acked.append(keyed)
            else:
                by_deadline.setdefault(keyed[1].seconds, []).append(keyed)
        yield from _cut(acked, [ack_id for _, ack_id in acked])
        for together in by_deadline.values():
            yield from _cut(together, [hidden.receipt for _, hidden in together])

    # -- looking -------------------------------------------------------------------------------

    def depth(self) -> QueueDepth | None:
        return admin.depth(self._producer, self)

    def dead_letters(self, place: str | None) -> DeadLetters:
        dead = admin.letters_subscription(self._producer, self.client, place)
        return admin.PubSubDeadLetters(self, self.client, dead, self._producer.receive_timeout)


def _cut(entries: list[Keyed], ids: Iterable[str]) -> Iterator[list[Keyed]]:
    """Divides entries of one kind into requests that are as large as allowed."""
    # Of each entry, the bytes of all before it: so no entry is looked at by itself.
    before = [0, *accumulate(map(len, map(str.encode, ids)))]
    start = 0
    while start < len(entries):
        most = min(start + MAX_IDS, len(entries))
        end = bisect_right(before, before[start] + _MOST_BYTES, start, most + 1) - 1
        end = max(end, start + 1)
        yield entries[start:end]
        start = end


def _without(
    messages: Sequence[Received], gone: Collection[str]
) -> tuple[list[Received], list[str]]:
    """Returns what is left; and the receipts of what follows an expired one in its ordering key."""
    kept: list[Received] = []
    behind: list[str] = []
    keys: set[str] = set()
    for received in messages:
        if received.receipt in gone:
            keys.update([received.group] if received.group else [])
        elif received.group in keys:
            behind.append(received.receipt)
        else:
            kept.append(received)
    return kept, behind


def _properties(attributes: dict[str, str], key: str) -> str:
    """Returns the properties that a dead letter of the message keeps, as JSON text."""
    kept: dict[str, Any] = {}
    if attributes:
        kept["attributes"] = attributes
    if key:
        kept["ordering_key"] = key
    return json.dumps(kept, separators=(",", ":"))
