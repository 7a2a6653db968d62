"""A source of synthetic messages, to measure a stage without a broker.

Not for the Spark driver, which does not have ``airflow_broadway.testing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery, Lease, Source
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import POSITIVE
from airflow_broadway.testing import DummyProducer
from tests.benchmarks.pipelines import TwoBatchers

BODY = b"x" * 200


@options
class SyntheticProducer(DummyProducer):
    """Produces synthetic messages like Kafka's."""

    kind: ClassVar[str] = "made_up"

    messages: int = option(default=1, rule=POSITIVE, doc="How many there are.")

    def source(self, env: ProducerEnv) -> Source:
        return _Source(self, env)


class _Source:
    def __init__(self, producer: SyntheticProducer, env: ProducerEnv) -> None:
        self._clock = env.clock
        self._left = producer.messages
        self._count = 0
        self._ref = AckRef(None, env.generation, Delivery())
        self.lease = Lease(
            kind=producer.kind,
            generation=env.generation,
            seconds=producer.lease,
            deadline=env.clock.now() + timedelta(seconds=producer.lease),
            owner=dict(env.owner),
        )

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        size = min(demand, self._left)
        first, at = self._count, self._clock.now()
        self._left -= size
        self._count += size
        return [
            Message(
                BODY,
                metadata={
                    "topic": "bench",
                    "partition": 0,
                    "offset": offset,
                    "key": None,
                    "ts": 1_700_000_000_000,
                    "headers": [],
                },
                acknowledger=self._ref,
                message_id=f"bench-0-{offset}",
                batch_key=("bench", 0),
                received_at=at,
                position=offset,
                size=len(BODY),
            )
            for offset in range(first, first + size)
        ]

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def stop(self) -> Sequence[Message]:
        self._left = 0
        return []

    def close(self) -> None:
        pass


class SyntheticPipeline(TwoBatchers):
    """Receives synthetic messages like Kafka's."""

    producer = SyntheticProducer()
