"""Generations over the stub of Pub/Sub, on a manual clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.testing import ManualClock
from tests.pubsub_server import StubServer
from tests.pubsub_stub.errors import Refused
from tests.unit.producers.halves import Halves, generation_env

__all__ = ["Generation", "SubscriptionHarness", "open_subscription", "service_account"]

#: Of a subscription that confirms each id; `invalid` and `transient` are its two refusals.
INVALID, TRANSIENT = "PERMANENT_FAILURE_INVALID_ACK_ID", "TRANSIENT_FAILURE_OTHER"


def settings(**settings: Any) -> pytest.MarkDecorator:
    """Runs a test on a subscription with these settings."""
    return pytest.mark.parametrize("sub", [settings], indirect=True, ids=[" ".join(settings)])


exactly_once = settings(enable_exactly_once_delivery=True)


class Generation(Halves):
    """A source and a custodian of one generation at a subscription."""

    def take_more(self) -> list[Message]:
        """Receives after the subscription was found empty."""
        return list(self.source.secure(self.source.receive(1000, timeout=5.0)))


class SubscriptionHarness:
    """A subscription at a stub, and generations of it.

    :param settings: Of the subscription.
    """

    def __init__(self, server: StubServer, clock: ManualClock, staging: str | None, settings: Any):
        self.server = server
        self.broker = server.broker
        self.clock = clock
        self.staging = staging
        self.topic = server.topic()
        self.name = server.subscription(self.topic, **settings)
        self._open: list[Generation] = []

    def put(self, *bodies: str, **more: Any) -> list[str]:
        return self.server.publish(self.topic, [body.encode() for body in bodies], **more)

    def begin(self, **options: Any) -> Generation:
        """Starts a generation; one request at a time by default."""
        defaults = {
            "subscription": self.name,
            "endpoint": f"http://{self.server.host}",
            "receive_concurrency": 1,
            "receive_timeout": 5.0,  # a busy machine may be slower than the stub
        }
        env = generation_env(self.clock, self.staging)
        generation = Generation(PubSubProducer(**{**defaults, **options}), env)
        self._open.append(generation)
        return generation

    def taken(self, *bodies: str, **options: Any) -> tuple[Generation, list[Message]]:
        """Publishes messages, and receives them by a fresh generation."""
        self.put(*bodies)
        run = self.begin(**options)
        return run, run.take()

    def nack(self, ack_id: str, subscription: str = "") -> None:
        """Releases a message by a client of its own."""
        self.server.subscriber.modify_ack_deadline(
            subscription=subscription or self.name, ack_ids=[ack_id], ack_deadline_seconds=0
        )

    def deny(self, call: str) -> None:
        """Refuses every such request from now on."""
        denied = Refused("PERMISSION_DENIED", "User not authorized to perform this action.")
        self.broker.answer = lambda action, _: denied if action == call else None

    def refuse_once(self, call: str, refusal: Refused, *, after: float = 0.0) -> None:
        """Refuses the next such request, which takes ``after`` seconds."""
        refusals = [refusal]

        def answer(action: str, _: object) -> Refused | None:
            if action != call or not refusals:
                return None
            self.clock.advance(after)
            return refusals.pop()

        self.broker.answer = answer

    def left(self) -> int:
        """Returns the number of messages that are not acknowledged."""
        return len(self.broker.subscriptions[self.name].left)

    def drain(self) -> list[str]:
        """Receives and removes the messages that are visible."""
        return [message.data.decode() for message in self.server.drain(self.name)]

    def close(self) -> None:
        for generation in self._open:
            generation.close()


@contextmanager
def open_subscription(staging: object = None, **settings: Any) -> Iterator[SubscriptionHarness]:
    """Opens a subscription of its own.

    :param staging: The folder of its receipts; ``None``: they are in memory.
    """
    clock = ManualClock()
    folder = None if staging is None else f"file://{staging}"
    with (
        StubServer(clock, patience=0.0) as server,
        closing(SubscriptionHarness(server, clock, folder, settings)) as subscription,
    ):
        yield subscription


def service_account(name: str = "a") -> dict[str, str]:
    """Returns a service account's key, made for this test."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "key-project",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": f"{name}@key-project.iam.gserviceaccount.com",
        "token_uri": "https://oauth2.googleapis.com/token",
    }
