"""Pub/Sub by the tests' own stub: what ``Publish`` names is confirmed.

To drain it the stub's clock is moved on, past the longest deadline: what comes only then was held
by somebody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.contract.sqs_harness import SharedClock
from tests.living.brokers import DEAD, LEASE, Left
from tests.living.publisher import body_of, number_of
from tests.pubsub_server import StubServer

#: Ordering keys.
_KEYS = 16
#: Seconds after which a retry is delivered, and after which everything is.
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


class LivingPubSub:
    """A subscription of its own at a server, and one of its dead letters.

    :param clock: The file of the server's clock.
    :param keyed: Whether messages have ordering keys, which the subscription keeps in order.
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
        """Where a proxy reaches the server."""
        host, _, port = self._server.host.partition(":")
        return host, int(port)

    def reached_by(self, port: int) -> None:
        """Lets runs go through a proxy at this port."""
        self.options = {**self.options, "endpoint": f"http://127.0.0.1:{port}"}

    def group_of(self, number: int) -> int | None:
        return number % _KEYS if self._keyed else None

    def free(self) -> bool:
        return True

    def sender(self) -> _Sender:
        return _Sender(self._server, self._topic, keyed=self._keyed)

    def lapse(self) -> None:
        time.sleep(_SHORT)  # the requests of a killed run are carried out before
        self._clock.sleep(LEASE + 1.0)

    def drain(self) -> list[Left]:
        time.sleep(_SHORT)
        messages = list(self._drained(self._subscription, "source"))
        if not self._moved:
            self._moved = True
            self._clock.sleep(_LONG)
        messages += self._drained(self._subscription, "leased")
        return [*messages, *self._drained(self._dead, DEAD)]

    def _drained(self, subscription: str, place: str) -> Iterator[Left]:
        attempts = self._server.attempts(subscription)
        for message in self._server.drain(subscription):
            again = attempts.get(message.message_id, 0) > 0
            yield Left(number_of(message.data.decode()), place, again)
