from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.testing.contract import CustodyContract, DeadLettersContract
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import bodies
from tests.contract.kafka_harness import KafkaHarness
from tests.kafka_server import KafkaServer, MockKafka

pytestmark = pytest.mark.broker


def harness_of(kafka: KafkaServer, folder: Path, order: str) -> KafkaHarness:
    topic = kafka.topic()
    kafka.topic(f"{topic}-dlt")
    return KafkaHarness(kafka.bootstrap, topic, f"file://{folder}", order)


class TestShared(CustodyContract):
    """Two runs may share a partition."""

    @pytest.fixture
    def harness(self, kafka_mock: MockKafka, tmp_path: Path) -> KafkaHarness:
        return harness_of(kafka_mock, tmp_path, "none")


@pytest.mark.slow
class TestSharedAtNoida(CustodyContract):
    """The same at the other peer, for which ``TestByKey`` stands."""

    @pytest.fixture
    def harness(self, kafka_noida: KafkaServer, tmp_path: Path) -> KafkaHarness:
        return harness_of(kafka_noida, tmp_path, "none")


class TestByKey(CustodyContract):
    """A partition is one run's alone until that is settled; each message has a key of its own."""

    shares: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka_noida: KafkaServer, tmp_path: Path) -> KafkaHarness:
        return harness_of(kafka_noida, tmp_path, "key")


class TestInOrder(CustodyContract):
    """A partition is one run's alone, and what comes again holds up all behind it."""

    shares: ClassVar[bool] = False
    independent: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka_mock: MockKafka, tmp_path: Path) -> KafkaHarness:
        return harness_of(kafka_mock, tmp_path, "partition")


class TestDeaths(ContractBase):
    """Kafka counts the deaths of what was claimed last."""

    @pytest.fixture
    def harness(self, kafka_mock: MockKafka, tmp_path: Path) -> KafkaHarness:
        return harness_of(kafka_mock, tmp_path, "none")

    @pytest.mark.parametrize("damaged", [True, False])
    def test_who_was_killed_after_its_manifest_has_not_died_at_work(
        self, harness: KafkaHarness, damaged: bool
    ) -> None:
        """Not even where the manifest is damaged, and the source was not closed yet."""
        harness.max_crashes = 2
        harness.send(bodies(25))
        taken: list[int] = []
        with ExitStack() as killed:
            for number in range(6):
                source = killed.enter_context(self.source(harness, f"g{number}"))
                taken.append(len(self.take(source)))
                lease = self.copied(source.lease)
                self.settle(harness, lease, Settlement(rest=RELEASE, damaged=damaged))
        assert (set(taken) == {25}) is damaged  # else ever fewer are taken at a time


class TestDeadLetters(DeadLettersContract):
    """They lie in a log: what is sent back is another message of its topic."""

    keeps_id: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka_mock: MockKafka, tmp_path: Path) -> KafkaHarness:
        return harness_of(kafka_mock, tmp_path, "none")


@pytest.mark.slow
class TestDeadLettersThatStay(DeadLettersContract):
    """On a peer that has retention and a disk."""

    keeps_id: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, kafka_noida: KafkaServer, tmp_path: Path) -> KafkaHarness:
        return harness_of(kafka_noida, tmp_path, "none")
