"""A group on a topic of its own, and what tests do with the two halves of its producer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.claims import Claims, group_files
from airflow_broadway.producers.kafka.settling import Claim
from airflow_broadway.producers.kafka.source import KafkaSource
from airflow_broadway.testing.clock import SkippingClock
from airflow_broadway.testing.harness import settlement_of
from tests.kafka_server import QUICK_SOURCE, ApacheKafka, KafkaServer

__all__ = ["KafkaGroup", "offsets", "reset_offsets"]


class KafkaGroup:
    """One pipeline's group.

    :param retries: Whether it has a retry topic though its own order needs none.
    :param options: Of its producer.
    """

    def __init__(
        self,
        kafka: KafkaServer,
        folder: Path,
        *,
        partitions: int = 1,
        retries: bool = False,
        **options: Any,
    ) -> None:
        self.kafka = kafka
        self.topic = kafka.topic(partitions=partitions)
        self.letters = kafka.topic(f"{self.topic}-dlt")
        self.retries = f"{self.topic}.retry"
        if retries or options.get("order") == "none":
            kafka.topic(self.retries)
        self.group = f"group-{uuid.uuid4().hex}"
        self.staging: str | None = f"file://{folder}"
        self.clock = SkippingClock()
        self.options: dict[str, Any] = {"offset_reset_policy": "earliest", **options}

    def producer(self, **options: Any) -> KafkaProducer:
        fields: dict[str, Any] = {
            "group_id": self.group,
            "topics": [self.topic],
            "hosts": self.kafka.bootstrap,
            "conn_id": None,
            "settings": QUICK_SOURCE,
            **self.options,
            **options,
        }
        return KafkaProducer(**fields)

    def env(self, generation: str, index: int | None = None) -> ProducerEnv:
        return ProducerEnv(
            pipeline="flights",
            generation=generation,
            owner={"dag_id": "flights", "run_id": "manual", "task_id": "process"},
            index=index or 0,
            alone=index is None,
            clock=self.clock,
            staging=self.staging,
        )

    @contextmanager
    def source(
        self, generation: str = "", *, index: int | None = None, **options: Any
    ) -> Iterator[KafkaSource]:
        env = self.env(generation or uuid.uuid4().hex, index)
        source = self.producer(**options).source(env)
        assert isinstance(source, KafkaSource)
        try:
            yield source
        finally:
            source.close()

    def take(self, source: KafkaSource, most: int = 100_000) -> list[Message]:
        taken: list[Message] = []
        while len(taken) < most:
            received = source.receive(min(500, most - len(taken)), timeout=0.0)
            if not received:
                break
            taken += source.secure(received)
        return taken

    def hold(
        self, generation: str = "", most: int = 100_000, *, fill: int = 0, **options: Any
    ) -> tuple[Lease, list[Message]]:
        """Sends ``fill`` messages and receives in a run; returns its lease as others read it."""
        if fill:
            self.fill(fill)
        with self.source(generation, **options) as source:
            messages = self.take(source, most)
            source.stop()
            return Lease.from_json(json.loads(json.dumps(source.lease.to_json()))), messages

    def settle(
        self,
        lease: Lease,
        messages: Iterable[Message],
        verdicts: Mapping[str, Verdict] | None = None,
        rest: Verdict = ACK,
        **options: Any,
    ) -> SettleReport:
        return self.carry_out(lease, settlement_of(list(messages), verdicts, rest), **options)

    def carry_out(self, lease: Lease, settlement: Settlement, **options: Any) -> SettleReport:
        custodian = self.producer(**options).custodian(self.env("custodian"))
        try:
            return custodian.settle(lease, settlement)
        finally:
            custodian.close()

    def die_settling(
        self, place: Any, name: str, lease: Lease, messages: Iterable[Message], *verdicts: Any
    ) -> None:
        """Kills a settlement at a call of a method."""

        killed = mock.patch.object(place, name, side_effect=KeyboardInterrupt)
        with killed, pytest.raises(KeyboardInterrupt):
            self.settle(lease, messages, *verdicts)

    def drain(self, **options: Any) -> list[Message]:
        """Receives and acknowledges by another run."""
        lease, messages = self.hold(**options)
        self.settle(lease, messages, **options)
        return messages

    def claims(self) -> Claims:
        with self.kafka.consumer() as consumer:
            cluster = str(consumer.list_topics(timeout=30).cluster_id)
        return Claims(group_files(self.staging, cluster, self.group))

    def claim(self, partition: int = 0, topic: str = "") -> Claim:
        claim = self.claims().read((topic or self.topic, partition))
        assert claim is not None
        return claim

    def committed(self) -> dict[int, int]:
        """Returns the committed offset per partition."""
        committed = self.kafka.committed(self.group, self.topic)
        return {partition: offset for partition, (offset, _) in committed.items()}

    def fill(self, count: int, *, start: int = 0, **fields: Any) -> list[bytes]:
        bodies = [b"%06d" % number for number in range(start, start + count)]
        self.kafka.fill(self.topic, bodies, **fields)
        return bodies


def offsets(messages: Iterable[Message]) -> list[int]:
    """The offsets of messages."""
    return [message.metadata["offset"] for message in messages]


def reset_offsets(group: KafkaGroup, *where: str) -> None:
    """Resets the group on its topic, by Kafka's own tool."""
    assert isinstance(group.kafka, ApacheKafka)
    scope = ("--group", group.group, "--topic", group.topic)
    group.kafka.consumer_groups(*scope, "--reset-offsets", *where, "--execute")
