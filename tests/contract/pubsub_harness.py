"""Pub/Sub for the custody contract: a stub on a shared manual clock, or Google's emulator.

The emulator runs in real time, with short leases.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from functools import cache

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.testing.harness import Harness
from tests.contract.sqs_harness import SharedClock
from tests.pubsub_server import PubSubServer, Remote


@cache
def _server(host: str) -> PubSubServer:
    return Remote(host)


class PubSubHarness(Harness):
    """
    :param clock: The shared clock's file; empty: the real one.
    :param keyed: Whether every message has its own ordering key.
    """

    def __init__(
        self,
        host: str,
        clock: str,
        topic: str,
        subscription: str,
        dead: str,
        staging: str,
        keyed: bool = False,
        lease: float = 60.0,
    ) -> None:
        super().__init__(host, clock, topic, subscription, dead, staging, keyed, lease)
        self.lease = lease
        self.clock: Clock = SharedClock(clock) if clock else SystemClock()
        self._host = host
        self._topic = topic
        self.subscription = subscription
        self._dead = dead
        self._staging = staging
        self._keyed = keyed

    def producer(self) -> Producer:
        return PubSubProducer(
            subscription=self.subscription,
            dead_letter=self._dead,
            lease=self.lease,
            message_ordering=self._keyed,
            receive_interval=0.05,
            **_server(self._host).options,
        )

    def env(self, generation: str) -> ProducerEnv:
        return dataclasses.replace(super().env(generation), shared=self._staging)

    def send(self, bodies: Sequence[bytes]) -> None:
        # Without groups every message has its own key, and waits for no other.
        messages = [
            {"data": body, **({"ordering_key": self._key(number)} if self._keyed else {})}
            for number, body in enumerate(bodies)
        ]
        _server(self._host).publish_all(self._topic, messages)

    def _key(self, number: int) -> str:
        return str(number % self.groups) if self.groups else uuid.uuid4().hex
