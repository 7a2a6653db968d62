"""The rules of Pub/Sub, in memory: topics, subscriptions and valid requests."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from google.pubsub_v1.types import pubsub as types

from airflow_broadway.core.clock import Clock, SystemClock
from tests.pubsub_stub.errors import Refused, of_ids
from tests.pubsub_stub.subscription import INVALID, UNORDERED, StoredMessage, Subscription

__all__ = ["MOST_IDS", "MOST_REQUEST_BYTES", "Broker"]

MOST_IDS = 2_500
#: Of a request about ids.
MOST_REQUEST_BYTES = 512 * 1024
_MOST_MESSAGE_BYTES = 10 * 1000 * 1000
_MOST_MESSAGES = 1_000
_LONGEST_DEADLINE = 600
#: Attributes of a message; bytes of their keys, of their values, and of an ordering key.
_ATTRIBUTES, _KEY, _VALUE = 100, 256, 1_024

_Published, _Received = types.PubsubMessage.pb(), types.ReceivedMessage.pb()


class Broker:
    """Every request is a method, which raises its refusal as :class:`Refused`.

    :param answer: Called as ``answer(call, request)`` before each request, e.g. with ``"Pull"``: an
        error to answer, or ``None`` to do what Pub/Sub would.
    :param late_acks: Whether late acknowledgements remove the message.  Without exactly-once
        delivery Pub/Sub does both.
    """

    def __init__(self, clock: Clock | None = None, *, late_acks: bool = False) -> None:
        self.clock = clock or SystemClock()
        self.late_acks = late_acks
        self.answer: Callable[[str, Any], Refused | None] = lambda call, request: None
        #: The refusal of one id of an exactly-once subscription, before the rules.
        self.confirm: Callable[[str], str | None] = lambda ack_id: None
        #: Requests by call; and the ids or messages in them.
        self.requests: Counter[str] = Counter()
        self.entries: Counter[str] = Counter()
        self.topics: dict[str, Any] = {}
        self.subscriptions: dict[str, Subscription] = {}
        #: By topic: place and message of all publications.
        self.published: dict[str, list[tuple[int, Any]]] = {}
        self.snapshots: dict[str, tuple[str, list[int]]] = {}
        self.changed = threading.Condition(threading.RLock())
        self._places = itertools.count(1)
        self._numbers = itertools.count(1)

    def now(self) -> float:
        """Seconds since the epoch, by this broker's clock."""
        return self.clock.now().timestamp()

    # -- topics --------------------------------------------------------------------------------

    def create_topic(self, topic: Any) -> Any:
        _check_name(topic.name, "topics")
        if topic.name in self.topics:
            raise Refused("ALREADY_EXISTS", f"Resource already exists (resource={topic.name}).")
        self.topics[topic.name] = topic
        self.published[topic.name] = []
        return topic

    def get_topic(self, request: Any) -> Any:
        return self._topic(request.topic)

    def delete_topic(self, request: Any) -> None:
        self._topic(request.topic)
        del self.topics[request.topic], self.published[request.topic]
        for subscription in self.subscriptions.values():
            if subscription.settings.topic == request.topic:
                subscription.settings.topic = "_deleted-topic_"

    def publish(self, request: Any) -> list[str]:
        self._topic(request.topic)
        if not 1 <= len(request.messages) <= _MOST_MESSAGES:
            raise Refused("INVALID_ARGUMENT", "The value for message_count is out of range.")
        if request.ByteSize() > _MOST_MESSAGE_BYTES:
            text = "Request payload size exceeds the limit: 10485760 bytes."
            raise Refused("INVALID_ARGUMENT", text)
        for message in request.messages:
            _check_message(message)
        self.entries["Publish"] += len(request.messages)
        return [self._publish(request.topic, message) for message in request.messages]

    def _publish(self, topic: str, message: Any) -> str:
        place = next(self._places)
        stored_copy = _Published()
        stored_copy.CopyFrom(message)
        stored_copy.message_id = str(place)
        stored_copy.publish_time.FromDatetime(self.clock.now().replace(tzinfo=None))
        self.published[topic].append((place, stored_copy))
        for subscription in self.subscriptions.values():
            if subscription.settings.topic == topic:
                subscription.put(place, stored_copy)
        return str(stored_copy.message_id)

    def _topic(self, name: str) -> Any:
        if name not in self.topics:
            raise Refused("NOT_FOUND", f"Resource not found (resource={_last(name)}).")
        return self.topics[name]

    # -- subscriptions -------------------------------------------------------------------------

    def create_subscription(self, settings: Any) -> Any:
        _check_name(settings.name, "subscriptions")
        self._topic(settings.topic)
        if settings.name in self.subscriptions:
            raise Refused("ALREADY_EXISTS", f"Resource already exists (resource={settings.name}).")
        settings.ack_deadline_seconds = settings.ack_deadline_seconds or 10
        if not 10 <= settings.ack_deadline_seconds <= _LONGEST_DEADLINE:
            raise Refused("INVALID_ARGUMENT", "Invalid ack deadline given (10 to 600 seconds).")
        settings.state = types.Subscription.State.ACTIVE
        self.subscriptions[settings.name] = Subscription(settings, self._numbers)
        return settings

    def get_subscription(self, request: Any) -> Any:
        return self._subscription(request.subscription).settings

    def delete_subscription(self, request: Any) -> None:
        del self.subscriptions[self._subscription(request.subscription).name]

    def detach_subscription(self, request: Any) -> None:
        settings = self._subscription(request.subscription).settings
        settings.detached = True
        self.subscriptions[settings.name] = Subscription(settings, self._numbers)

    def _subscription(self, name: str) -> Subscription:
        if name not in self.subscriptions:
            raise Refused("NOT_FOUND", f"Resource not found (resource={_last(name)}).")
        return self.subscriptions[name]

    def _pulled(self, name: str) -> Subscription:
        """Returns a pull subscription."""
        pulled = self._subscription(name)
        settings = pulled.settings
        if settings.detached:
            raise Refused(
                "FAILED_PRECONDITION", f"The subscription {name} is detached from its topic."
            )
        if (
            settings.push_config.push_endpoint
            or settings.HasField("bigquery_config")
            or settings.HasField("cloud_storage_config")
        ):
            raise Refused(
                "FAILED_PRECONDITION",
                "Method is not supported for push and export subscriptions: the subscription"
                f" {name} is not a pull subscription.",
            )
        return pulled

    # -- messages ------------------------------------------------------------------------------

    def pull(self, request: Any) -> list[StoredMessage]:
        subscription = self._pulled(request.subscription)
        if request.max_messages < 1:
            raise Refused("INVALID_ARGUMENT", "The max_messages must be greater than 0.")
        pulled = subscription.take(min(request.max_messages, 1_000), self.now())
        self._publish_dead(subscription)
        self.entries["Pull"] += len(pulled)
        return pulled

    def shown(self, name: str, pulled: Sequence[StoredMessage]) -> list[Any]:
        """Returns the answer of a pull; with attempts only under a dead-letter policy."""
        counted = self._subscription(name).settings.dead_letter_policy.dead_letter_topic
        return [
            _Received(
                ack_id=stored.ack_id,
                message=stored.message,
                delivery_attempt=stored.attempts if counted else 0,
            )
            for stored in pulled
        ]

    def acknowledge(self, request: Any) -> None:
        subscription = self._checked(request)
        self.entries["Acknowledge"] += len(request.ack_ids)
        self._each(subscription, request.ack_ids, self._acknowledge)

    def modify_ack_deadline(self, request: Any) -> None:
        seconds = request.ack_deadline_seconds
        if not 0 <= seconds <= _LONGEST_DEADLINE:
            raise Refused("INVALID_ARGUMENT", "Invalid ack deadline given (0 to 600 seconds).")
        subscription = self._checked(request)
        self.entries["ModifyAckDeadline"] += len(request.ack_ids)
        now = self.now()

        def change(of: Subscription, ack_id: str) -> str | None:
            stored = of.flying.get(ack_id)
            if stored is None:
                return INVALID
            if seconds:
                of.hide(stored, now + seconds)
            else:
                of.release(stored, now)
            return None

        self._each(subscription, request.ack_ids, change)
        self._publish_dead(subscription)

    def _checked(self, request: Any) -> Subscription:
        subscription = self._pulled(request.subscription)
        if not request.ack_ids:
            raise Refused("INVALID_ARGUMENT", "No ack ids specified.")
        if request.ByteSize() > MOST_REQUEST_BYTES:
            text = f"Request payload size exceeds the limit: {MOST_REQUEST_BYTES} bytes."
            raise Refused("INVALID_ARGUMENT", text)
        if len(request.ack_ids) > MOST_IDS:
            raise Refused("INVALID_ARGUMENT", f"At most {MOST_IDS} ack ids are allowed.")
        if not subscription.exactly_once:
            for ack_id in request.ack_ids:
                if not ack_id.startswith(f"{subscription.name}:"):
                    raise Refused("INVALID_ARGUMENT", f"Invalid ack id (ack_id={ack_id})")
        subscription.wake(self.now())
        return subscription

    def _each(
        self,
        subscription: Subscription,
        ack_ids: Sequence[str],
        change: Callable[[Subscription, str], str | None],
    ) -> None:
        """Applies a change by id; an exactly-once subscription reports the refused ids."""
        if not subscription.exactly_once:
            for ack_id in ack_ids:
                change(subscription, ack_id)
            return
        results = {key: self.confirm(key) or change(subscription, key) for key in ack_ids}
        refused = {ack_id: refusal for ack_id, refusal in results.items() if refusal is not None}
        if refused:
            raise of_ids(refused)

    def _acknowledge(self, subscription: Subscription, ack_id: str) -> str | None:
        stored = subscription.flying.get(ack_id)
        if stored is None and ack_id in subscription.acked:
            return None
        if stored is None and self.late_acks and not subscription.exactly_once:
            stored = subscription.stale.get(ack_id)
            if stored is None or stored.place not in subscription.left:
                return INVALID
            subscription.flying.pop(stored.ack_id, None)
        if stored is None:
            return INVALID
        if subscription.exactly_once and subscription.earlier_is_open(stored):
            return UNORDERED
        subscription.acknowledge(stored)
        return None

    def _publish_dead(self, subscription: Subscription) -> None:
        """Publishes the dead letters of the subscription's own policy."""
        while subscription.dead:
            stored = subscription.dead.popleft()
            letter = _Published()
            letter.CopyFrom(stored.message)
            source = "CloudPubSubDeadLetterSource"
            letter.attributes[f"{source}DeliveryCount"] = str(stored.attempts)
            letter.attributes[f"{source}Subscription"] = _last(subscription.name)
            letter.attributes[f"{source}SubscriptionProject"] = subscription.name.split("/")[1]
            topic = subscription.settings.dead_letter_policy.dead_letter_topic
            if topic in self.topics:
                self._publish(topic, letter)

    # -- seeking -------------------------------------------------------------------------------

    def create_snapshot(self, request: Any) -> str:
        subscription = self._subscription(request.subscription)
        self.snapshots[request.name] = (subscription.settings.topic, list(subscription.left))
        return str(subscription.settings.topic)

    def seek(self, request: Any) -> None:
        """Restores the messages of a snapshot or a timestamp; voids all earlier ack ids."""
        subscription = self._subscription(request.subscription)
        everything = self.published.get(subscription.settings.topic, [])
        stored_copy = subscription.settings.retain_acked_messages
        if request.snapshot:
            if request.snapshot not in self.snapshots:
                raise Refused("NOT_FOUND", "Resource not found (snapshot).")
            wanted = set(self.snapshots[request.snapshot][1])
        else:
            since = request.time.seconds + request.time.nanos / 1e9
            wanted = {
                place
                for place, message in everything
                if message.publish_time.ToNanoseconds() / 1e9 >= since
                and (stored_copy or place in subscription.left)
            }
        again = Subscription(subscription.settings, self._numbers)
        for place, message in everything:
            if place in wanted:
                again.put(place, message)
        self.subscriptions[subscription.name] = again


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _check_name(name: str, kind: str) -> None:
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "projects" or parts[2] != kind or len(parts[3]) < 3:
        raise Refused("INVALID_ARGUMENT", f"Invalid [{kind}] name: (name={name})")


def _check_message(message: Any) -> None:
    def must(holds: bool, text: str) -> None:
        if not holds:
            raise Refused("INVALID_ARGUMENT", text)

    must(bool(message.data or message.attributes), "Some messages in the batch are empty.")
    must(len(message.attributes) <= _ATTRIBUTES, "A message has too many attributes (100).")
    must(len(message.ordering_key.encode()) <= _VALUE, "The ordering key is too long (1024).")
    for key, value in message.attributes.items():
        must(0 < len(key.encode()) <= _KEY, "An attribute's key is empty or too long (256).")
        must(not key.startswith("goog"), "An attribute's key begins with 'goog'.")
        must(len(value.encode()) <= _VALUE, "An attribute's value is too long (1024).")
