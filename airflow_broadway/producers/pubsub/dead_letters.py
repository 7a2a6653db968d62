"""Builds, lists and requeues dead letters.

A dead letter has the original body, and the reason in attributes within Pub/Sub's limits.
``broadway_reason``, ``broadway_stage``, ``broadway_attempt``, ``broadway_message_id`` and
``broadway_subscription`` are added to the message's own attributes.  A message may have 100
attributes and 10 MB in total: ``broadway_`` attributes that do not fit are omitted, the least
important first.

Pub/Sub treats a requeued dead letter as a new message.  So it has ``broadway_requeued`` with its
original id, and is received as redelivered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

from airflow_broadway.core.custody.dead_letters import DeadLetter
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import cut
from airflow_broadway.producers.engine.letters import EngineDeadLetters, attempt_of
from airflow_broadway.producers.engine.port import Denied, Hidden, Publisher, Received
from airflow_broadway.producers.pubsub import limits
from airflow_broadway.producers.pubsub.client import Client

#: The attributes of a dead letter, the most important first; they replace those of an earlier dead
#: letter.
_OURS: Final = (
    "broadway_reason",
    "broadway_message_id",
    "broadway_attempt",
    "broadway_stage",
    "broadway_subscription",
)
#: The attribute prefix of a message that Pub/Sub's own dead-letter policy has forwarded.
_GOOGLES: Final = "CloudPubSubDeadLetterSource"
#: Pub/Sub's name for a deleted topic.
DELETED: Final = "_deleted-topic_"
#: Bytes of overhead per request, and per message and attribute.
_PER_REQUEST, _PER_PART = 1024, 16
#: The maximum bytes of the messages in a request.
ROOM: Final = limits.MAX_MESSAGE - _PER_REQUEST


def letter(entry: Entry, subscription: str) -> dict[str, Any]:
    """Builds the message to publish for one dead letter.

    :param entry: The entry, with payload and properties as received.
    :param subscription: The full name of the source subscription.
    """
    properties: dict[str, Any] = json.loads(entry.properties or "{}")
    own = _own_attributes(properties.get("attributes", {}))
    message: dict[str, Any] = {"data": entry.payload or b"", "attributes": own}
    if properties.get("ordering_key"):
        message["ordering_key"] = properties["ordering_key"]
    remaining = ROOM - size_of(message)
    fields = {
        "broadway_reason": cut(entry.verdict.reason, limits.MAX_VALUE),
        "broadway_message_id": entry.message_id,
        "broadway_attempt": str(entry.attempt),
        "broadway_stage": entry.verdict.stage,
        "broadway_subscription": cut(subscription, limits.MAX_VALUE),
    }
    for name, value in fields.items():
        size = len(name) + len(value.encode()) + _PER_PART
        if value and len(own) < limits.MAX_ATTRIBUTES and size <= remaining:
            own[name] = value
            remaining -= size
    if not message["data"] and not own:
        own["broadway_attempt"] = str(entry.attempt)  # Pub/Sub rejects empty messages
    return message


def size_of(message: Mapping[str, Any]) -> int:
    """Returns an upper bound for the bytes of a message in a request."""
    attributes = message["attributes"]
    texts = sum(
        len(key.encode()) + len(value.encode()) + _PER_PART for key, value in attributes.items()
    )
    return len(message["data"]) + texts + len(message.get("ordering_key", "").encode()) + _PER_PART


# -- parsing dead letters --------------------------------------------------------------------------


def letter_of(message: Any, subscription: str) -> DeadLetter:
    """Parses a dead letter of this package, or of Pub/Sub's policy, which has no reason.

    :param subscription: The pipeline's subscription.
    """
    attributes: Mapping[str, str] = message.attributes

    def field(name: str) -> str:
        return str(attributes.get(f"broadway_{name}", ""))

    def google(name: str) -> str:
        return str(attributes.get(f"{_GOOGLES}{name}", ""))

    origin = field("subscription")
    if not origin and google("Subscription"):
        project = google("SubscriptionProject")
        origin = f"projects/{project}/subscriptions/{google('Subscription')}"
    return DeadLetter(
        message_id=message.message_id,
        body=message.data,
        properties={"attributes": _own_attributes(attributes), "orderingKey": message.ordering_key},
        reason=field("reason"),
        stage=field("stage"),
        attempt=attempt_of(field("attempt")),
        enqueued_at=_timestamp(google("TopicPublishTime")),
        died_at=_timestamp(timestamp_of(message.publish_time) or "") if origin else None,
        generation="",
        origin=origin or subscription,
        original_id=field("message_id") or message.message_id,
    )


def sent_back(message: Any, message_id: str) -> dict[str, Any]:
    """Builds the message to publish that requeues a dead letter.

    :param message: The dead letter as received.
    :param message_id: The id of the original message.
    :raises ProducerError: If one more attribute does not fit.
    """
    own = _own_attributes(message.attributes)
    if len(own) >= limits.MAX_ATTRIBUTES:
        raise ProducerError(
            f"it has {limits.MAX_ATTRIBUTES} attributes, the most that Pub/Sub takes: there is no"
            f" room for {limits.REQUEUED}, by which it would be known as redelivered"
        )
    own[limits.REQUEUED] = cut(message_id, limits.MAX_VALUE)
    request = {"data": message.data, "attributes": own}
    return {**request, "ordering_key": message.ordering_key} if message.ordering_key else request


def _own_attributes(attributes: Mapping[str, str]) -> dict[str, str]:
    """Returns the attributes of the original message, without those of a dead letter."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OURS and name != limits.REQUEUED and not name.startswith(_GOOGLES)
    }


def _timestamp(text: str) -> datetime | None:
    try:
        timestamp = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return timestamp if timestamp.tzinfo is not None else None


# -- timestamps ------------------------------------------------------------------------------------


def timestamp_of(stamp: Any) -> str | None:
    """Converts a protobuf timestamp to text, many times faster than protobuf does."""
    seconds, nanos = stamp.seconds, stamp.nanos
    if not seconds and not nanos:
        return None
    return f"{_second(seconds)}.{nanos // 1000:06d}+00:00"


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


# -- the dead-letter subscription ------------------------------------------------------------------


def publisher_of(client: Client, topic: str) -> Publisher:
    """Returns a publisher to a topic."""
    return Publisher(
        partial(client.publish, topic),
        "Publish",
        size_of,
        limits.MAX_PUBLISH,
        ROOM,
    )


class PubSubDeadLetters(EngineDeadLetters):
    """The dead letters of one subscription; an empty pull is the end."""

    word: ClassVar[str] = "subscription"

    def fetch(self) -> list[Received]:
        while pulled := self.dead.pull(limits.MAX_PULL, self.source.producer.receive_timeout):
            received = [
                Received(raw.message.message_id, raw.ack_id, raw, raw.delivery_attempt)
                for raw in pulled
            ]
            hidden = (
                (letter.key, Hidden(letter.receipt, self.hidden_seconds)) for letter in received
            )
            refused = self.requests.send(self.dead.hide, hidden)
            if rest := [letter for letter in received if letter.key not in refused]:
                return rest
        return []

    def limit(self) -> tuple[int | None, str]:
        try:
            policy = self.dead.settings().dead_letter_policy
        except Denied:  # without the limit: Pub/Sub forwards dead letters, and deletes none
            return None, "max_delivery_attempts"
        limit = int(policy.max_delivery_attempts) if policy.dead_letter_topic else None
        return limit, "max_delivery_attempts"

    def publisher(self, name: str) -> Publisher:
        client: Client = self.source.client
        topic = str(client.other(name).settings().topic)
        if topic == DELETED:
            raise ProducerError(f"the topic of the subscription {name!r} was deleted")
        return publisher_of(client, topic)

    def back(self, letter: DeadLetter, received: Received, to: str) -> dict[str, Any]:
        return sent_back(received.raw.message, letter.original_id)

    def letter(self, received: Received) -> DeadLetter:
        return letter_of(received.raw.message, self.source.name)
