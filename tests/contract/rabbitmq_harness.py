"""RabbitMQ for the custody contract: a real broker in real time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pika

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.testing.contract import Harness
from tests.rabbitmq_server import RabbitServer


class RabbitHarness(Harness):
    marks_unseen = True

    def __init__(
        self, url: str, queue: str, staging: str, kind: str = "classic", lease: float = 6.0
    ) -> None:
        super().__init__(url, queue, staging, kind, lease)
        self.lease = lease
        self.clock = SystemClock()
        self._server = RabbitServer(Path(), given=url)
        self._queue = queue
        self._staging = staging
        self._kind = kind

    def declare(self) -> None:
        self._server.declare(self._queue, **{"x-queue-type": self._kind})

    def producer(self) -> Producer:
        uri = self._server.uri
        return RabbitMQProducer(queue=self._queue, uri=uri, lease=self.lease)

    def env(self, generation: str) -> ProducerEnv:
        return dataclasses.replace(super().env(generation), staging=self._staging)

    def send(self, bodies: Sequence[bytes]) -> None:
        with self._server.channel() as channel:
            for body in bodies:
                channel.basic_publish("", self._queue, body, pika.BasicProperties(delivery_mode=2))
            # Waits for the publications before it.
            channel.confirm_delivery()
            channel.queue_declare(self._queue, passive=True)
