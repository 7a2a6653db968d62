from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from airflow_broadway.testing.contract import CustodyContract, DeadLettersContract
from tests.contract.kafka_harness import KafkaHarness
from tests.kafka_server import KafkaServer

pytestmark = pytest.mark.broker


def harness_of(kafka: KafkaServer, folder: Path, order: str) -> KafkaHarness:
    topic = kafka.topic()
    kafka.topic(f"{topic}-dlt")
    if order == "none":
        kafka.topic(f"{topic}.retry")
    return KafkaHarness(kafka.bootstrap, topic, f"file://{folder}", order)


class OnKafka:
    order: ClassVar[str] = "none"
    #: A partition is leased by one run until its settlement.
    shares: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka, tmp_path):
        return harness_of(kafka, tmp_path, self.order)


class TestUnordered(OnKafka, CustodyContract):
    """Failures go to the retry topic."""


@pytest.mark.slow
class TestOnTheMock(TestUnordered):
    """On librdkafka's mock cluster, the stand-in for Apache Kafka where Maven is missing."""

    @pytest.fixture
    def harness(self, kafka_mock, tmp_path):
        return harness_of(kafka_mock, tmp_path, "none")


class TestByKey(OnKafka, CustodyContract):
    """Every message has its own key."""

    order: ClassVar[str] = "key"


class TestInOrder(OnKafka, CustodyContract):
    """A redelivery blocks all later messages of its partition."""

    order: ClassVar[str] = "partition"
    independent: ClassVar[bool] = False


class TestDeadLetters(OnKafka, DeadLettersContract):
    """In a log: a requeued letter is another message of its topic."""

    keeps_id: ClassVar[bool] = False
