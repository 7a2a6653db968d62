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


class TestUnordered(CustodyContract):
    """A partition is one run's alone until that is settled; failures go to the retry topic."""

    shares: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka, tmp_path):
        return harness_of(kafka, tmp_path, "none")


@pytest.mark.slow
class TestOnTheMock(TestUnordered):
    """On librdkafka's mock cluster, which stands in for Apache Kafka where Maven is missing."""

    @pytest.fixture
    def harness(self, kafka_mock, tmp_path):
        return harness_of(kafka_mock, tmp_path, "none")


class TestByKey(CustodyContract):
    """A partition is one run's alone until that is settled; each message has a key of its own."""

    shares: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka, tmp_path):
        return harness_of(kafka, tmp_path, "key")


class TestInOrder(CustodyContract):
    """A partition is one run's alone, and what comes again holds up all behind it."""

    shares: ClassVar[bool] = False
    independent: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka, tmp_path):
        return harness_of(kafka, tmp_path, "partition")


class TestDeadLetters(DeadLettersContract):
    """They lie in a log: what is sent back is another message of its topic."""

    keeps_id: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka, tmp_path):
        return harness_of(kafka, tmp_path, "none")
