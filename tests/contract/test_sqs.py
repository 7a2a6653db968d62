from __future__ import annotations

import importlib.util
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.model.options import override
from airflow_broadway.producers.sqs import dead_letters
from airflow_broadway.testing.contract import CustodyContract, DeadLettersContract
from airflow_broadway.testing.contract.redelivery import Redelivery
from airflow_broadway.testing.harness import bodies, settlement_of
from tests.contract.sqs_harness import SqsHarness, moved_server
from tests.rabbitmq_fixtures import in_ci
from tests.sqs_server import REGION

pytestmark = pytest.mark.broker


def harness_of(folder: Path, suffix: str = "") -> SqsHarness:
    if importlib.util.find_spec("moto") is None and not in_ci():
        pytest.skip("no SQS here: moto's server is not installed")
    server, clock = moved_server()
    name = uuid.uuid4().hex
    attributes = {"FifoQueue": "true"} if suffix else {}
    queue = server.queue(f"{name}{suffix}", **attributes)
    dead = server.queue(f"{name}-dead{suffix}", **attributes)
    return SqsHarness(server.url, clock, queue, dead, f"file://{folder}")


class OnSqs:
    suffix: ClassVar[str] = ""

    @pytest.fixture
    def harness(self, tmp_path):
        return harness_of(tmp_path, self.suffix)


class SqsContract(OnSqs, CustodyContract):
    #: What SQS accepts: text of at least one character, without control characters.
    odd_bodies: ClassVar[Sequence[bytes]] = ("zażółć".encode(), "😀\t\r\n".encode(), b"x" * 100_000)
    #: Receives run concurrently, and a standard queue promises no order.
    keeps_order: ClassVar[bool] = False


class TestSqs(SqsContract):
    many: ClassVar[int] = 300

    @pytest.mark.parametrize("seed", range(2))
    def test_a_kill_during_a_settlement_loses_nothing(self, harness, seed):
        super().test_a_kill_during_a_settlement_loses_nothing(harness, seed)

    @pytest.mark.slow
    def test_two_concurrent_processes_never_share_a_message(self, harness):
        super().test_two_concurrent_processes_never_share_a_message(harness)


@pytest.fixture
def immediate_answers(monkeypatch):
    """moto has one server, which answers completely."""
    monkeypatch.setattr(dead_letters, "_WAIT_SECONDS", 0)


@pytest.mark.usefixtures("immediate_answers")
class TestDeadLetters(OnSqs, DeadLettersContract):
    #: SQS assigns a new id to every message that is sent.
    keeps_id: ClassVar[bool] = False
    letters_killed: ClassVar[int] = 60
    hidden_seconds: ClassVar[float] = 301.0


class _Many(SqsContract):
    many: ClassVar[int] = 20_000


@pytest.mark.slow
def test_large_lease_is_settled_after_kills(tmp_path):
    _Many().test_a_kill_during_a_settlement_loses_nothing(harness_of(tmp_path), 0)


@pytest.mark.slow
class TestSqsFifo(SqsContract):
    suffix: ClassVar[str] = ".fifo"


@pytest.mark.parametrize(
    "name",
    [
        "test_every_message_is_in_exactly_one_count",
        "test_a_stopped_source_receives_no_later_messages",
        "test_a_kill_between_receive_and_settle_loses_nothing",
        "test_messages_of_a_lapsed_lease_are_redelivered_and_marked",
    ],
)
def test_fifo_queue_passes_core_contract(name, tmp_path):
    """The whole contract is slow."""
    getattr(TestSqsFifo(), name)(harness_of(tmp_path, ".fifo"))


class TestFifoRedelivery(OnSqs, Redelivery):
    suffix: ClassVar[str] = ".fifo"
    keeps_order: ClassVar[bool] = False  # every message has its own group


class Counting(SqsHarness):
    """Messages carry SQS's count of their receives."""

    def producer(self) -> Producer:
        changes = {"attribute_names": ["approximate_receive_count"]}
        changed: Producer = override(super().producer(), changes, "producer")
        return changed


def test_dead_generation_uses_one_receive_of_redrive_policy(tmp_path):
    server, clock = moved_server()
    dead = server.queue()
    policy = {
        "deadLetterTargetArn": f"arn:aws:sqs:{REGION}:123456789012:{dead.rpartition('/')[2]}",
        "maxReceiveCount": 10,
    }
    queue = server.queue(RedrivePolicy=json.dumps(policy))
    harness = Counting(server.url, clock, queue, dead, f"file://{tmp_path}")
    contract = TestSqs()
    harness.send(bodies(300))

    # Given five killed tasks, each with all messages leased
    for number in range(5):
        lease, messages = contract.hold(harness, f"killed {number}")
        assert len(messages) == 300 + 20 * number
        contract.settle(harness, lease, Settlement(rest=RELEASE))
        harness.send(bodies(20, start=1_000 * number + 1_000))

    # When one survives
    lease, messages = contract.hold(harness, "alive")

    # Then it has all of them, and SQS has dead-lettered none
    counts = {m.data: m.metadata["attributes"]["approximate_receive_count"] for m in messages}
    assert [counts[body] for body in bodies(300)] == [6] * 300
    assert contract.settle(harness, lease, settlement_of(messages)).acked == 400
    assert server.depth(queue) == server.depth(dead) == (0, 0, 0)
