"""Serves dead letters: the body as it came, and why, in attributes that fit Pub/Sub's limits.

``broadway_reason``, ``broadway_stage``, ``broadway_attempt``, ``broadway_message_id`` and
``broadway_subscription`` stand beside the message's own attributes.  A message may have 100, and
10 MB in all: what does not fit is left out, the least of ours first, and never the message's own.

A letter that is sent back becomes a new message to Pub/Sub.  So it has ``broadway_requeued``, the
id that it had, and is received as redelivered.
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

#: What a letter says of itself, the most useful first; those of an earlier one, come back by a
#: redrive, give way to it.
_OURS: Final = (
    "broadway_reason",
    "broadway_message_id",
    "broadway_attempt",
    "broadway_stage",
    "broadway_subscription",
)
#: What a letter has that Pub/Sub's own policy has set aside.
_GOOGLES: Final = "CloudPubSubDeadLetterSource"
#: What stands for a topic that was deleted.
DELETED: Final = "_deleted-topic_"
#: Bytes that a request has beside its messages, and a message and an attribute beside theirs.
_BESIDE, _EACH = 1024, 16
#: Bytes of the messages of a request.
ROOM: Final = limits.MAX_MESSAGE - _BESIDE


def letter(entry: Entry, subscription: str) -> dict[str, Any]:
    """Makes the message to publish for one dead letter.

    :param entry: With payload and properties as received.
    :param subscription: Its full name.
    """
    properties: dict[str, Any] = json.loads(entry.properties or "{}")
    own = _own(properties.get("attributes", {}))
    made: dict[str, Any] = {"data": entry.payload or b"", "attributes": own}
    if properties.get("ordering_key"):
        made["ordering_key"] = properties["ordering_key"]
    room = ROOM - size_of(made)
    why = {
        "broadway_reason": cut(entry.verdict.reason, limits.MAX_VALUE),
        "broadway_message_id": entry.message_id,
        "broadway_attempt": str(entry.attempt),
        "broadway_stage": entry.verdict.stage,
        "broadway_subscription": cut(subscription, limits.MAX_VALUE),
    }
    for name, value in why.items():
        size = len(name) + len(value.encode()) + _EACH
        if value and len(own) < limits.MAX_ATTRIBUTES and size <= room:
            own[name] = value
            room -= size
    if not made["data"] and not own:
        own["broadway_attempt"] = str(entry.attempt)  # Pub/Sub takes no message of nothing
    return made


def size_of(message: Mapping[str, Any]) -> int:
    """Returns the bytes of a message in a request, at most."""
    attributes = message["attributes"]
    texts = sum(
        len(key.encode()) + len(value.encode()) + _EACH for key, value in attributes.items()
    )
    return len(message["data"]) + texts + len(message.get("ordering_key", "").encode()) + _EACH


# -- a letter, read --------------------------------------------------------------------------------


def letter_of(message: Any, subscription: str) -> DeadLetter:
    """Reads a letter, by us or by Pub/Sub's own policy, which states no reason.

    :param subscription: The one that the pipeline drains.
    """
    attributes: Mapping[str, str] = message.attributes

    def stated(name: str) -> str:
        return str(attributes.get(f"broadway_{name}", ""))

    def google(name: str) -> str:
        return str(attributes.get(f"{_GOOGLES}{name}", ""))

    origin = stated("subscription")
    if not origin and google("Subscription"):
        project = google("SubscriptionProject")
        origin = f"projects/{project}/subscriptions/{google('Subscription')}"
    return DeadLetter(
        message_id=message.message_id,
        body=message.data,
        properties={"attributes": _own(attributes), "orderingKey": message.ordering_key},
        reason=stated("reason"),
        stage=stated("stage"),
        attempt=attempt_of(stated("attempt")),
        enqueued_at=_instant(google("TopicPublishTime")),
        died_at=_instant(timestamp_of(message.publish_time) or "") if origin else None,
        generation="",
        origin=origin or subscription,
        original_id=stated("message_id") or message.message_id,
    )


def sent_back(message: Any, message_id: str) -> dict[str, Any]:
    """Makes the message to publish that sends a letter back.

    :param message: The letter, as protobuf has it.
    :param message_id: What the message was called.
    :raises ProducerError: If it has no room for our mark.
    """
    own = _own(message.attributes)
    if len(own) >= limits.MAX_ATTRIBUTES:
        raise ProducerError(
            f"it has {limits.MAX_ATTRIBUTES} attributes, the most that Pub/Sub takes: there is no"
            f" room for {limits.REQUEUED}, by which it would be known as redelivered"
        )
    own[limits.REQUEUED] = cut(message_id, limits.MAX_VALUE)
    made = {"data": message.data, "attributes": own}
    return {**made, "ordering_key": message.ordering_key} if message.ordering_key else made


def _own(attributes: Mapping[str, str]) -> dict[str, str]:
    """Returns the message's own attributes, without those of a letter."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OURS and name != limits.REQUEUED and not name.startswith(_GOOGLES)
    }


def _instant(text: str) -> datetime | None:
    try:
        instant = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return instant if instant.tzinfo is not None else None


# -- timestamps ------------------------------------------------------------------------------------


def timestamp_of(stamp: Any) -> str | None:
    """Reads a timestamp of protobuf as text; its own conversion takes many times as long."""
    seconds, nanos = stamp.seconds, stamp.nanos
    if not seconds and not nanos:
        return None
    return f"{_second(seconds)}.{nanos // 1000:06d}+00:00"


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


# -- the place -------------------------------------------------------------------------------------


def publisher_of(client: Client, topic: str) -> Publisher:
    """Publishes messages to a topic."""
    return Publisher(
        partial(client.publish, topic),
        "Publish",
        size_of,
        limits.MAX_PUBLISH,
        ROOM,
    )


class PubSubDeadLetters(EngineDeadLetters):
    """The letters that one subscription shows; a pull that finds nothing is the end."""

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
            gone = self.requests.send(self.dead.hide, hidden)
            if kept := [letter for letter in received if letter.key not in gone]:
                return kept
        return []

    def limit(self) -> tuple[int | None, str]:
        try:
            policy = self.dead.settings().dead_letter_policy
        except Denied:  # what Pub/Sub then moves goes to yet another topic, and is not deleted
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
