"""One run's halves over the stub of Pub/Sub, on a clock that is moved by hand."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.engine.custodian import EngineCustodian
from airflow_broadway.producers.engine.source import EngineSource
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.testing import ManualClock
from tests.pubsub_server import StubServer
from tests.unit.producers.sqs.kit import settlement, take

__all__ = ["Generation", "Place", "place", "service_account", "settlement"]


class Generation:
    """A source and a custodian of one generation."""

    def __init__(self, producer: PubSubProducer, env: ProducerEnv) -> None:
        self.producer = producer
        self.env = env
        self.source: EngineSource = producer.source(env)  # type: ignore[assignment]
        self.custodian: EngineCustodian = producer.custodian(env)  # type: ignore[assignment]

    def take(self, demand: int = 100_000) -> list[Message]:
        return take(self.source, demand)

    def take_more(self) -> list[Message]:
        """What comes after the subscription was found empty."""
        source = self.source
        return list(source.secure(source.receive(1000, timeout=5.0)))

    def settle(
        self,
        messages: Sequence[Message],
        verdicts: dict[str, Verdict] | None = None,
        rest: Verdict = ACK,
        *,
        by: Custodian | None = None,
    ) -> SettleReport:
        """Settle by a manifest that names ``messages``; ``verdicts`` by body."""
        given = settlement(messages, verdicts, rest)
        return (by or self.custodian).settle(self.source.lease, given)

    def other(self) -> Custodian:
        """A custodian as another process opens it: it knows what is written down."""
        return self.producer.custodian(self.env)

    def close(self) -> None:
        self.source.close()
        self.custodian.close()


class Place:
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
        """A fresh generation; requests one at a time unless told otherwise."""
        given = {
            "subscription": self.name,
            "endpoint": f"http://{self.server.host}",
            "receive_concurrency": 1,
            "receive_timeout": 5.0,  # the stub answers at once; a busy machine may not
            **options,
        }
        env = ProducerEnv(
            generation=uuid.uuid4().hex,
            owner={"dag_id": "d", "run_id": "r", "task_id": "process", "map_index": -1},
            clock=self.clock,
            shared=self.staging,
        )
        made = Generation(PubSubProducer(**given), env)
        self._open.append(made)
        return made

    def left(self) -> int:
        """Messages that are not acknowledged."""
        return len(self.broker.subscriptions[self.name].left)

    def waiting(self) -> list[str]:
        """What can be had at once; it is taken away."""
        return [each.data.decode() for each in self.server.drain(self.name)]

    def close(self) -> None:
        for each in self._open:
            each.close()


@contextmanager
def place(staging: object = None, **settings: Any) -> Iterator[Place]:
    """A subscription of its own.

    :param staging: The folder in which its receipts are; ``None``: in memory.
    """
    clock = ManualClock()
    folder = None if staging is None else f"file://{staging}"
    with StubServer(clock, patience=0.0) as server:
        made = Place(server, clock, folder, settings)
        try:
            yield made
        finally:
            made.close()


def service_account(name: str = "a") -> dict[str, str]:
    """A service account's key, made for this test.

    :param name: Whose it is.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    made = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "key-project",
        "private_key_id": "1",
        "private_key": made.decode(),
        "client_email": f"{name}@key-project.iam.gserviceaccount.com",
        "token_uri": "https://oauth2.googleapis.com/token",
    }
