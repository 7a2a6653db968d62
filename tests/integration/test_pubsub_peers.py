"""Equal behaviour of the tests' two Pub/Subs, and the stub's additional rules."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.testing import ManualClock
from tests.conformance import units_pubsub
from tests.pubsub_server import PubSubServer, StubServer
from tests.pubsub_stub.errors import Refused

pytestmark = pytest.mark.broker


def queue(server: PubSubServer, **settings: Any) -> tuple[str, str]:
    topic = server.topic()
    return topic, server.subscription(topic, **settings)


def acknowledge(server: PubSubServer, subscription: str, ack_ids: list[str]) -> None:
    server.subscriber.acknowledge(
        request={"subscription": subscription, "ack_ids": ack_ids}, retry=None
    )


def hold(server: PubSubServer, subscription: str, ack_ids: list[str], seconds: int) -> None:
    server.subscriber.modify_ack_deadline(
        request={"subscription": subscription, "ack_ids": ack_ids, "ack_deadline_seconds": seconds},
        retry=None,
    )


def data(deliveries: list[Any]) -> list[bytes]:
    return [delivery.message.data for delivery in deliveries]


def confirmations(error: Any) -> dict[str, str]:
    """Returns the confirmations of an exactly-once subscription, by id."""
    [info] = error.details
    assert info.reason == "EXACTLY_ONCE_ACKID_FAILURE"
    return dict(info.metadata)


def test_messages_keep_their_published_fields(pubsub):
    topic, subscription = queue(pubsub)
    [own] = pubsub.publish(topic, [b"one"], attributes={"kind": "a"}, ordering_key="k")

    [received] = pubsub.pull(subscription)

    assert received.message.data == b"one"
    assert received.message.message_id == own
    assert dict(received.message.attributes) == {"kind": "a"}
    assert received.message.ordering_key == "k"
    assert received.message.publish_time
    assert received.delivery_attempt == 0
    acknowledge(pubsub, subscription, [received.ack_id])
    acknowledge(pubsub, subscription, [received.ack_id])  # repeated without an error
    assert pubsub.pull(subscription) == []


def test_a_nack_releases_immediately_and_an_old_id_is_void(pubsub):
    topic, subscription = queue(pubsub)
    pubsub.publish(topic, [b"one"])
    [first] = pubsub.pull(subscription)
    hold(pubsub, subscription, [first.ack_id], 0)
    [second] = pubsub.pull(subscription)
    assert second.ack_id != first.ack_id

    acknowledge(pubsub, subscription, [first.ack_id])
    hold(pubsub, subscription, [second.ack_id], 0)

    assert data(pubsub.pull(subscription)) == [b"one"]


def test_a_lapsed_lease_is_redelivered(pubsub_emulator):
    topic, subscription = queue(pubsub_emulator)
    pubsub_emulator.publish(topic, [b"one"])
    [first] = pubsub_emulator.pull(subscription)
    hold(pubsub_emulator, subscription, [first.ack_id], 1)
    begun = time.monotonic()

    [again] = pubsub_emulator.subscriber.pull(
        request={"subscription": subscription, "max_messages": 1}, timeout=20
    ).received_messages

    assert again.message.data == b"one"
    assert time.monotonic() - begun > 0.9


def test_the_stub_uses_the_injected_clock():
    clock = ManualClock()
    with StubServer(clock) as server:
        topic, subscription = queue(server, ack_deadline_seconds=30)
        server.publish(topic, [b"one"])
        [first] = server.pull(subscription)
        clock.advance(29.0)
        assert server.pull(subscription) == []
        hold(server, subscription, [first.ack_id], 600)
        clock.advance(599.0)
        assert server.pull(subscription) == []
        clock.advance(1.0)
        assert data(server.pull(subscription)) == [b"one"]


def test_an_exactly_once_subscription_confirms_each_id(pubsub):
    from google.api_core.exceptions import InvalidArgument

    topic, subscription = queue(pubsub, enable_exactly_once_delivery=True)
    pubsub.publish(topic, [b"one", b"two"])
    first, second = (delivery.ack_id for delivery in pubsub.pull(subscription))
    hold(pubsub, subscription, [first], 0)
    [again] = pubsub.pull(subscription)

    with pytest.raises(InvalidArgument) as caught:
        acknowledge(pubsub, subscription, [first, second])

    assert confirmations(caught.value) == {first: "PERMANENT_FAILURE_INVALID_ACK_ID"}
    with pytest.raises(InvalidArgument) as caught:
        hold(pubsub, subscription, [first], 60)
    assert confirmations(caught.value) == {first: "PERMANENT_FAILURE_INVALID_ACK_ID"}
    hold(pubsub, subscription, [again.ack_id], 0)
    # The second message stays acknowledged.
    assert len(pubsub.pull(subscription)) == 1


def test_a_key_is_delivered_in_order_after_messages_in_flight(pubsub):
    topic, subscription = queue(pubsub, enable_message_ordering=True)
    for number in range(6):
        pubsub.publish(topic, [b"%d" % number], ordering_key=f"k{number % 2}")
    taken = pubsub.pull(subscription)
    for key in ("k0", "k1"):
        lane = [delivery.message.data for delivery in taken if delivery.message.ordering_key == key]
        assert lane == sorted(lane)
    assert len(taken) == 6
    pubsub.publish(topic, [b"8"], ordering_key="k0")
    assert pubsub.pull(subscription) == []

    acknowledge(pubsub, subscription, [delivery.ack_id for delivery in taken])

    assert data(pubsub.pull(subscription)) == [b"8"]


def test_an_out_of_order_ack_of_a_key_is_refused(pubsub):
    from google.api_core.exceptions import InvalidArgument

    topic, subscription = queue(
        pubsub, enable_message_ordering=True, enable_exactly_once_delivery=True
    )
    pubsub.publish(topic, [b"one", b"two"], ordering_key="k")
    first, second = (delivery.ack_id for delivery in pubsub.pull(subscription))

    with pytest.raises(InvalidArgument) as caught:
        acknowledge(pubsub, subscription, [second])

    assert confirmations(caught.value) == {second: "TRANSIENT_FAILURE_UNORDERED_ACK_ID"}
    acknowledge(pubsub, subscription, [first, second])
    assert pubsub.pull(subscription) == []


def test_a_dead_letter_policy_counts_deliveries(pubsub):
    dead = pubsub.topic()
    grave = pubsub.subscription(dead)
    policy = {"dead_letter_topic": dead, "max_delivery_attempts": 5}
    topic, subscription = queue(pubsub, dead_letter_policy=policy)
    pubsub.publish(topic, [b"one"], attributes={"kind": "a"})

    for attempt in range(1, 6):
        [received] = pubsub.pull(subscription)
        assert received.delivery_attempt == attempt
        hold(pubsub, subscription, [received.ack_id], 0)
    assert pubsub.pull(subscription) == []

    [letter] = pubsub.drain(grave)
    assert letter.data == b"one"
    assert letter.attributes["kind"] == "a"
    assert letter.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5"
    assert letter.attributes["CloudPubSubDeadLetterSourceSubscription"] == subscription[-36:]


def test_a_seek_invalidates_ack_ids(pubsub):
    topic, subscription = queue(pubsub)
    pubsub.publish(topic, [b"one"])
    snapshot = f"projects/broadway-tests/snapshots/{subscription[-36:]}"
    pubsub.subscriber.create_snapshot(request={"name": snapshot, "subscription": subscription})
    pubsub.drain(subscription)
    assert pubsub.pull(subscription) == []

    pubsub.subscriber.seek(request={"subscription": subscription, "snapshot": snapshot})

    [again] = pubsub.pull(subscription)
    pubsub.subscriber.seek(request={"subscription": subscription, "snapshot": snapshot})
    acknowledge(pubsub, subscription, [again.ack_id])
    assert data(pubsub.pull(subscription)) == [b"one"]


@pytest.mark.parametrize("call", ["pull", "acknowledge", "modify_ack_deadline"])
def test_missing_resources_are_reported(pubsub, call):
    from google.api_core.exceptions import NotFound

    more: dict[str, Any] = {"pull": {"max_messages": 1}}.get(call, {"ack_ids": ["a:1"]})
    request = {"subscription": "projects/broadway-tests/subscriptions/none", **more}
    with pytest.raises(NotFound):
        getattr(pubsub.subscriber, call)(request=request, retry=None)


def test_the_stub_refuses_what_pubsub_refuses(pubsub_stub):
    from google.api_core import exceptions as api_errors

    topic, subscription = queue(pubsub_stub)
    pushed = pubsub_stub.subscription(topic, push_config={"push_endpoint": "https://example.com"})
    written = pubsub_stub.subscription(topic, bigquery_config={"table": "p.d.t"})
    detached = pubsub_stub.subscription(topic)
    pubsub_stub.publisher.detach_subscription(request={"subscription": detached})
    for name in (pushed, written, detached):
        with pytest.raises(api_errors.FailedPrecondition):
            pubsub_stub.pull(name)
    with pytest.raises(api_errors.InvalidArgument, match="At most 2500"):
        acknowledge(pubsub_stub, subscription, [f"{subscription}:{n}" for n in range(2_501)])
    with pytest.raises(api_errors.InvalidArgument, match="524288"):
        acknowledge(pubsub_stub, subscription, [f"{subscription}:{'9' * 300_000}"] * 2)
    with pytest.raises(api_errors.InvalidArgument, match="deadline"):
        hold(pubsub_stub, subscription, [f"{subscription}:1"], 601)
    for message in (
        {"data": b""},
        {"data": b"x" * 10_000_001},
        {"data": b"x", "attributes": {"k" * 257: "v"}},
        {"data": b"x", "attributes": {"k": "v" * 1_025}},
        {"data": b"x", "attributes": {f"k{n}": "v" for n in range(101)}},
        {"data": b"x", "ordering_key": "k" * 1_025},
    ):
        with pytest.raises(api_errors.InvalidArgument):
            pubsub_stub.publish_all(topic, [message])


def test_the_stub_injects_responses(pubsub_stub):
    from google.api_core import exceptions as api_errors

    topic, subscription = queue(pubsub_stub)
    pubsub_stub.publish(topic, [b"one"])
    responses = {
        "Pull": Refused("PERMISSION_DENIED", "User not authorized to perform this action."),
        "Acknowledge": Refused("UNAVAILABLE", "lost", done=True),
    }
    pubsub_stub.broker.answer = lambda call, _: responses.get(call)
    with pytest.raises(api_errors.PermissionDenied):
        pubsub_stub.pull(subscription)
    del responses["Pull"]
    [received] = pubsub_stub.pull(subscription)

    with pytest.raises(api_errors.ServiceUnavailable):
        acknowledge(pubsub_stub, subscription, [received.ack_id])

    assert pubsub_stub.broker.subscriptions[subscription].left == {}


@pytest.mark.parametrize("late_acks", [False, True])
def test_a_late_ack_may_or_may_not_succeed(late_acks):
    clock = ManualClock()
    with StubServer(clock, late_acks=late_acks) as server:
        topic, subscription = queue(server)
        server.publish(topic, [b"one"])
        [first] = server.pull(subscription)
        clock.advance(11.0)
        [second] = server.pull(subscription)

        acknowledge(server, subscription, [first.ack_id])

        hold(server, subscription, [second.ack_id], 0)
        assert bool(server.pull(subscription)) is not late_acks


def test_a_nack_redelivers_later_messages_of_its_key(pubsub_stub):
    topic, subscription = queue(pubsub_stub, enable_message_ordering=True)
    pubsub_stub.publish(topic, [b"1", b"2", b"3"], ordering_key="k")
    first, second, third = (delivery.ack_id for delivery in pubsub_stub.pull(subscription))
    acknowledge(pubsub_stub, subscription, [first, third])

    hold(pubsub_stub, subscription, [second], 0)

    assert data(pubsub_stub.pull(subscription)) == [b"2", b"3"]


def test_nacked_messages_are_redelivered_in_order_except_by_the_emulator(pubsub):
    topic, subscription = queue(pubsub, enable_message_ordering=True)
    pubsub.publish(topic, [b"1", b"2", b"3"], ordering_key="k")
    ack_ids = [delivery.ack_id for delivery in pubsub.pull(subscription)]

    hold(pubsub, subscription, ack_ids[::-1], 0)

    again = data(pubsub.pull(subscription))
    assert again == ([b"3", b"2", b"1"] if pubsub.kind == "emulator" else [b"1", b"2", b"3"])


def test_a_retry_policy_delays_nacked_messages():
    clock = ManualClock()
    with StubServer(clock) as server:
        waits = {"minimum_backoff": {"seconds": 10}, "maximum_backoff": {"seconds": 15}}
        topic, subscription = queue(server, retry_policy=waits)
        server.publish(topic, [b"one"])
        for wait in (10.0, 15.0):
            [received] = server.pull(subscription)
            hold(server, subscription, [received.ack_id], 0)
            clock.advance(wait - 0.1)
            assert server.pull(subscription) == []
            clock.advance(0.1)
        assert len(server.pull(subscription)) == 1


@pytest.mark.parametrize("name", units_pubsub.AT_ANY)
def test_requests_match_broadways_cases(name, pubsub_emulator):
    file = Path(units_pubsub.__file__).with_name("cases.json")
    cases = {case["id"]: case for case in json.loads(file.read_text("utf-8"))["cases"]}
    units_pubsub.AT_ANY[name](cases[name], pubsub_emulator)
