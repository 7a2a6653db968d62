"""Pub/Sub in the traffic tests, by a stub: a message is confirmed when ``Publish`` returns its id.

Draining advances the stub's clock past the longest ack deadline.  Messages that are delivered only
then were leased.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.contract.sqs_harness import SharedClock
from tests.pubsub_server import StubServer
from tests.traffic.brokers import DEAD, LEASE, QueuedMessage
from tests.traffic.publisher import body_of, number_of

#: Number of ordering keys.
_KEYS = 16
#: Seconds after which a retry is delivered, and after which every message is.
_SHORT, _LONG = 1.5, 700.0


class _Sender:
    def __init__(self, server: StubServer, topic: str, *, keyed: bool) -> None:
        self._server = server
        self._topic = topic
        self._keyed = keyed

    def send(self, numbers: Sequence[int]) -> Iterator[int]:
        messages = [
            {
                "data": body_of(number),
                **({"ordering_key": str(number % _KEYS)} if self._keyed else {}),
            }
            for number in numbers
        ]
        for number, _ in zip(numbers, self._server.publish_all(self._topic, messages), strict=True):
            yield number

    def close(self) -> None:
        pass


class PubSubTraffic:
    """A topic with a subscription, and a dead-letter topic.

    :param clock: The file of the server's clock.
    :param keyed: Whether messages have ordering keys and the subscription preserves their order.
    """

    kind = "pubsub"

    def __init__(self, server: StubServer, clock: str, *, keyed: bool = False, **more: Any) -> None:
        self._server = server
        self._clock = SharedClock(clock)
        self._keyed = keyed
        self._topic, dead = server.topic(), server.topic()
        self._subscription = server.subscription(self._topic, enable_message_ordering=keyed, **more)
        self._dead = server.subscription(dead)
        self._moved = False
        self.options: Mapping[str, Any] = {
            "subscription": self._subscription,
            "dead_letter": dead,
            "message_ordering": keyed,
            **server.options,
        }
        self.connections: Mapping[str, Mapping[str, Any]] = {}

    def address(self) -> tuple[str, int]:
        """Returns host and port of the server."""
        host, _, port = self._server.host.partition(":")
        return host, int(port)

    def use_proxy(self, port: int) -> None:
        """Makes the next runs connect to the proxy at this port."""
        self.options = {**self.options, "endpoint": f"http://127.0.0.1:{port}"}

    def group_of(self, number: int) -> int | None:
        return number % _KEYS if self._keyed else None

    def is_unlocked(self) -> bool:
        return True

    def sender(self) -> _Sender:
        return _Sender(self._server, self._topic, keyed=self._keyed)

    def expire_leases(self) -> None:
        time.sleep(_SHORT)  # lets the server finish the requests of a killed run
        self._clock.sleep(LEASE + 1.0)

    def drain(self) -> list[QueuedMessage]:
        time.sleep(_SHORT)
        messages = list(self._drain_queue(self._subscription, "source"))
        if not self._moved:
            self._moved = True
            self._clock.sleep(_LONG)
        messages += self._drain_queue(self._subscription, "leased")
        return [*messages, *self._drain_queue(self._dead, DEAD)]

    def _drain_queue(self, subscription: str, place: str) -> Iterator[QueuedMessage]:
        attempts = self._server.attempts(subscription)
        for message in self._server.drain(subscription):
            duplicates = attempts.get(message.message_id, 0) > 0
            yield QueuedMessage(number_of(message.data.decode()), place, duplicates)
