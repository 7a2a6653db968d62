"""Kafka for the custody contract: a topic per test, on any server."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from functools import cache
from typing import Any

import confluent_kafka

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.testing.harness import Harness
from tests.kafka_server import QUICK_SOURCE


@cache
def _sender(bootstrap: str) -> Any:
    return confluent_kafka.Producer({"bootstrap.servers": bootstrap, "log_level": 0})


class KafkaHarness(Harness):
    #: Lapsed messages are taken over half a minute after the lease: a tenth of it is more.
    lease = 400.0

    def __init__(self, bootstrap: str, topic: str, staging: str, order: str) -> None:
        super().__init__(bootstrap, topic, staging, order)
        self._bootstrap, self._topic, self._staging, self._order = bootstrap, topic, staging, order

    def producer(self) -> Producer:
        return KafkaProducer(
            hosts=self._bootstrap,
            conn_id=None,
            group_id=f"group of {self._topic}",
            topics=[self._topic],
            offset_reset_policy="earliest",
            order=self._order,
            lease=self.lease,
            settings=QUICK_SOURCE,
        )

    def env(self, generation: str) -> ProducerEnv:
        return dataclasses.replace(super().env(generation), staging=self._staging)

    def send(self, bodies: Sequence[bytes]) -> None:
        producer = _sender(self._bootstrap)
        failed: list[Any] = []

        def report(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        for number, body in enumerate(bodies):
            # Without groups every message has its own key, and waits for no other.
            key = b"%d" % (number % self.groups) if self.groups else uuid.uuid4().bytes
            producer.produce(self._topic, body, key, on_delivery=report)
            producer.poll(0)
        assert not producer.flush(30)
        assert not failed
