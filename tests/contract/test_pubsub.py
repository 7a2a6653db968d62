from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from airflow_broadway.producers.engine.letters import EngineDeadLetters
from airflow_broadway.testing.contract import CustodyContract, DeadLettersContract
from airflow_broadway.testing.contract.redelivery import Redelivery
from airflow_broadway.testing.harness import Harness
from tests.contract.pubsub_harness import PubSubHarness
from tests.contract.sqs_harness import SharedClock
from tests.pubsub_fixtures import wanted_emulator
from tests.pubsub_server import PubSubServer, StubServer

pytestmark = pytest.mark.broker


def harness_of(
    server: PubSubServer,
    folder: Path,
    clock: str = "",
    *,
    keyed: bool = False,
    lease: float = 60.0,
    **settings: Any,
) -> PubSubHarness:
    topic, dead = server.topic(), server.topic()
    subscription = server.subscription(topic, enable_message_ordering=keyed, **settings)
    server.subscription(dead, dead.rpartition("/")[2])
    staging = f"file://{folder}/staging"
    return PubSubHarness(server.host, clock, topic, subscription, dead, staging, keyed, lease)


class PubSubContract(CustodyContract):
    #: Pulls run concurrently, and without ordering keys there is no order.
    keeps_order: ClassVar[bool] = False
    #: What Pub/Sub accepts: anything but an empty message.
    odd_bodies = (b"\x00\xff not UTF-8", "zażółć".encode(), b"x" * 100_000)


class OnStub:
    """At the stub, with a manual clock and every setting."""

    settings: ClassVar[dict[str, Any]] = {}
    keyed: ClassVar[bool] = False
    late_acks: ClassVar[bool] = False

    @pytest.fixture
    def harness(self, tmp_path):
        clock = str(tmp_path / "clock")
        with StubServer(SharedClock(clock), late_acks=self.late_acks) as server:
            yield harness_of(server, tmp_path, clock, keyed=self.keyed, **self.settings)


class TestStub(OnStub, PubSubContract):
    """At least once; late acknowledgements change nothing."""


class TestDeadLetters(OnStub, DeadLettersContract):
    #: Pub/Sub assigns a new id to every published message.
    keeps_id: ClassVar[bool] = False
    hidden_seconds: ClassVar[float] = EngineDeadLetters.hidden_seconds + 1.0


@pytest.mark.parametrize(
    "name",
    [
        "test_a_dead_letter_has_its_message_and_the_reason",
        "test_listing_leaves_all_dead_letters_in_place",
        "test_a_requeued_message_is_unchanged_on_its_first_attempt",
        "test_only_selected_dead_letters_are_requeued",
    ],
)
def test_emulator_passes_core_dead_letter_contract(name, tmp_path):
    harness: Harness = harness_of(wanted_emulator(), tmp_path, lease=10.0)
    getattr(TestDeadLetters(), name)(harness)


@pytest.mark.slow
class TestExactlyOnce(OnStub, PubSubContract):
    settings: ClassVar[dict[str, Any]] = {"enable_exactly_once_delivery": True}


@pytest.mark.slow
class TestLateAcknowledgements(OnStub, PubSubContract):
    """Pub/Sub may accept a late acknowledgement, even of a message leased elsewhere."""

    late_acks: ClassVar[bool] = True


@pytest.mark.slow
class TestOrdered(OnStub, PubSubContract):
    keyed: ClassVar[bool] = True


@pytest.mark.slow
class TestOrderedExactlyOnce(OnStub, PubSubContract):
    keyed: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {"enable_exactly_once_delivery": True}


@pytest.mark.slow
class TestEmulator(PubSubContract):
    """At Google's emulator, in real time."""

    @pytest.fixture
    def harness(self, tmp_path):
        return harness_of(wanted_emulator(), tmp_path, lease=10.0)


@pytest.mark.parametrize(
    "name",
    [
        "test_every_message_is_in_exactly_one_count",
        "test_messages_of_a_lapsed_lease_are_redelivered_and_marked",
        "test_a_zombie_settles_no_message_of_another_generation",
        "test_a_kill_between_receive_and_settle_loses_nothing",
    ],
)
@pytest.mark.parametrize(
    "suite", [TestExactlyOnce, TestLateAcknowledgements, TestOrderedExactlyOnce]
)
def test_special_subscriptions_pass_core_contract(suite, name, tmp_path):
    """The whole contract is slow."""
    clock = str(tmp_path / "clock")
    with StubServer(SharedClock(clock), late_acks=suite.late_acks) as server:
        harness: Harness = harness_of(server, tmp_path, clock, keyed=suite.keyed, **suite.settings)
        getattr(suite(), name)(harness)


@pytest.mark.parametrize(
    "name",
    [
        "test_every_message_is_in_exactly_one_count",
        "test_a_stopped_source_receives_no_later_messages",
        "test_a_message_arrives_as_it_was_sent",
    ],
)
def test_emulator_passes_core_contract(name, tmp_path):
    """The whole contract is slow."""
    harness: Harness = harness_of(wanted_emulator(), tmp_path, lease=10.0)
    getattr(TestEmulator(), name)(harness)


class TestOrderedRedelivery(OnStub, Redelivery):
    keyed: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = False  # every message has its own ordering key
