"""Receiving: requests, polls in flight, budgets, the end."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import pytest

from airflow_broadway import Batcher, Message, Processors, RetryPolicy
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import OptionsError, ProducerError, ProducerUnavailable
from airflow_broadway.producers.engine.port import Expired, Received
from airflow_broadway.producers.kit import checks
from airflow_broadway.producers.sqs import SqsProducer, client
from airflow_broadway.producers.sqs.adapter import request_of
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import URL, FakeSqs, client_error, installed
from tests.unit.passing import Passing
from tests.unit.producers.halves import recorded_spans
from tests.unit.producers.sqs.kit import FIFO, halves, options
from tests.waiting import eventually


def demands(fake: FakeSqs) -> list[int]:
    """Returns the number of messages that each receive requested."""
    assert fake.log is not None
    return [
        request["MaxNumberOfMessages"] for action, request in fake.log if action == "ReceiveMessage"
    ]


# ------------------------------------------------------------------------------------ requests


def test_receive_requests_lease_and_custody_attributes():
    request = request_of(SqsProducer(queue_url=URL, lease=90.5), 3)

    assert request == {
        "MaxNumberOfMessages": 3,
        "VisibilityTimeout": 91,
        "MessageSystemAttributeNames": ["ApproximateReceiveCount", "AWSTraceHeader"],
        "MessageAttributeNames": ["All"],
    }
    # A wait of 0 overrides the queue's own
    assert request_of(SqsProducer(queue_url=URL, wait_time_seconds=0), 3)["WaitTimeSeconds"] == 0


def test_fifo_receive_has_attempt_id_and_group():
    producer = SqsProducer(queue_name="orders.fifo", wait_time_seconds=20, attribute_names="all")

    first, second = request_of(producer, 10), request_of(producer, 10)

    assert first["ReceiveRequestAttemptId"] != second["ReceiveRequestAttemptId"]
    assert first["WaitTimeSeconds"] == 20
    assert first["MessageSystemAttributeNames"] == ["All"]
    plain = request_of(SqsProducer(queue_name="o.fifo"), 1)
    assert "MessageGroupId" in plain["MessageSystemAttributeNames"]


@options(
    attribute_names=["approximate_receive_count"],
    message_attribute_names=["kind", "trace.*"],
    dead_letter="orders-dead",  # needs all of them
)
def test_metadata_has_requested_attributes_only(run):
    attributes = {
        "kind": {"DataType": "String", "StringValue": "order"},
        "trace.id": {"DataType": "Binary", "BinaryValue": b"\x00\x01"},
        "other": {"DataType": "Number", "StringValue": "7"},
    }
    [message] = run.take_new(["a"], MessageAttributes=attributes)

    assert message.metadata["attributes"] == {"approximate_receive_count": 1}
    assert message.metadata["message_attributes"] == {
        "kind": {"data_type": "String", "string_value": "order"},
        "trace.id": {"data_type": "Binary", "binary_value": "AAE="},
    }
    saved = json.loads(message.acknowledger.data.properties)
    assert sorted(saved["attributes"]) == ["kind", "other", "trace.id"]


def test_demand_is_split_into_full_receives(run):
    run.fake.put([*map(str, range(100))])

    messages = run.source.secure(run.source.receive(25, timeout=0))

    assert len(messages) == 25
    assert demands(run.fake) == [10, 10, 5]


def test_lease_size_is_independent_of_message_count(run):
    run.fake.put([*map(str, range(2000))])
    assert len(run.take()) == 2000
    assert len(json.dumps(run.source.lease.to_json())) < 600


# --------------------------------------------------------------------------- several in flight


@options(receive_concurrency=4)
def test_receives_run_concurrently(run):
    run.fake.put([*map(str, range(40))])
    together = threading.Barrier(4)

    def answer(action: str, _: dict[str, Any]) -> None:
        if action == "ReceiveMessage" and run.fake.waiting():
            together.wait(timeout=30)

    run.fake.answer = answer

    assert len(run.source.receive(40, timeout=0)) == 40


@options(receive_concurrency=4)
def test_stop_releases_messages_not_handed_out(run):
    run.fake.put([*map(str, range(2000))])

    messages = run.source.secure(run.source.receive(1000, timeout=0))
    run.source.close()

    assert 500 <= len(messages) <= 1000
    assert len(run.fake.waiting()) == 2000 - len(messages)
    assert run.settle(messages).acked == len(messages)


@options(receive_concurrency=2, wait_time_seconds=20)
def test_poll_in_progress_completes_and_releases(run):
    polled, proceed = threading.Event(), threading.Event()

    def answer(_: object) -> Any:
        if len(demands(run.fake)) == 1:
            return {}  # the first is empty: the queue is quiet
        polled.set()
        assert proceed.wait(timeout=30)
        return None

    run.fake.answers("ReceiveMessage", answer)
    assert list(run.source.receive(10, timeout=0)) == []
    run.clock.advance(5.0)
    assert list(run.source.receive(10, timeout=0.01)) == []  # one poll is in progress
    assert polled.wait(timeout=30)
    run.fake.put(["late"])
    closing = threading.Thread(target=run.source.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    proceed.set()
    closing.join(timeout=30)

    assert run.fake.waiting() == ["late"]
    [late] = run.fake.queue().known.values()
    assert late.count == 1


# -------------------------------------------------------------------------------------- budgets


@options(receive_interval=5.0)
def test_empty_receive_is_repeated_after_interval(run):
    began = run.clock.monotonic()

    assert list(run.source.receive(10, timeout=21.0)) == []

    assert run.clock.monotonic() - began == pytest.approx(21.0, abs=0.1)
    assert run.fake.requests["ReceiveMessage"] == 5  # at 0, 5, 10, 15 and 20 s


@options(receive_concurrency=8, receive_interval=5.0)
def test_quiet_queue_is_polled_by_one_request(run):
    assert list(run.source.receive(1000, timeout=0)) == []
    while run.source._polls.flying:  # threads that have not started
        time.sleep(0.001)
    first = run.fake.requests["ReceiveMessage"]
    assert first <= 8
    run.clock.advance(5.0)

    assert list(run.source.receive(1000, timeout=0)) == []

    # It runs in its own thread
    eventually(lambda: run.fake.requests["ReceiveMessage"] > first)
    assert run.fake.requests["ReceiveMessage"] == first + 1


def test_in_flight_limit_does_not_end_run(caplog, run):
    run.fake.put([*map(str, range(100))])
    run.fake.answer = lambda action, _: (
        client_error("OverLimit") if len(demands(run.fake)) > 2 else None
    )

    assert len(run.take()) == 20

    assert len(demands(run.fake)) == 3
    assert "as many messages in flight as it may have" in caplog.text


@options(max_number_of_messages=1)
def test_receive_of_known_messages_is_not_empty(run):
    run.fake.put(["a", "b"])
    [first] = run.take(1)
    queue = run.fake.queue()
    queue.ready.appendleft(queue.known[first.message_id])

    [second] = run.take(1)

    assert second.data == b"b"


@options(receive_concurrency=2)
def test_buffered_message_is_renewed_before_hand_out(run):
    run.fake.put([*map(str, range(20))])
    assert len(run.source.receive(20, timeout=0)) == 20
    run.source._ready = [(run.clock.now().timestamp(), received(run.fake))]
    run.clock.advance(200.0)

    [message] = run.take(1)

    assert message.data == b"more"
    assert run.fake.entries["ChangeMessageVisibility"] == 1
    assert run.source._receipts._spans[-1][0] == run.clock.now().timestamp() + 600


@pytest.mark.parametrize("code", ["ReceiptHandleIsInvalid", "InternalError"])
def test_unrenewable_buffered_message_is_not_handed_out(code, run):
    run.source._ready = [(run.clock.now().timestamp(), received(run.fake))]
    run.clock.advance(200.0)

    refusal = {"Id": "0", "Code": code, "SenderFault": False}
    run.fake.answers("ChangeMessageVisibility", {"Successful": [], "Failed": [refusal]})

    assert run.take() == []
    run.fake.obey()
    run.clock.advance(400.0)  # its lease has lapsed
    assert [message.data for message in run.source.receive(1, timeout=5.0)] == [b"more"]


def received(fake: FakeSqs) -> Received:
    """Receives a new message by another client."""
    fake.put(["more"])
    raw = fake.receive()
    return Received(raw["MessageId"], raw["ReceiptHandle"], raw)


# ------------------------------------------------------------------------------------ failures


def test_short_outage_is_waited_out(caplog, run):
    run.fake.put(["a"])
    run.fake.answer = lambda action, _: (
        client_error("ServiceUnavailable", status=503) if len(demands(run.fake)) < 3 else None
    )
    run.fake.requests.clear()

    assert [message.data for message in run.take()] == [b"a"]

    assert "could not do ReceiveMessage" in caplog.text


def test_long_outage_ends_run(run):
    run.fake.answer = lambda *_: client_error("ServiceUnavailable", status=503)
    with pytest.raises(ProducerUnavailable, match="just now"):
        run.take()
    assert 60.0 <= run.clock.monotonic() < 70.0


def test_expired_credentials_end_run_immediately(run):
    run.fake.answer = lambda *_: client_error("ExpiredToken")
    with pytest.raises(Expired):
        run.take()
    assert len(demands(run.fake)) == 1


def test_denied_queue_attributes_are_optional(caplog):
    caplog.set_level(logging.INFO)
    fake = FakeSqs(ManualClock())
    fake.put(["a"])
    fake.answers("GetQueueAttributes", client_error("AccessDenied"))

    with halves(fake=fake) as run:
        assert len(run.take()) == 1
        assert run.producer.depth(run.env) is None

    assert "GetQueueAttributes is not allowed on 'orders'" in caplog.text
    assert "The depth of 'orders' is not known: " in caplog.text


def test_depth_has_sqs_counts_and_no_age(run):
    for kind, number in (("", 3), ("NotVisible", 4), ("Delayed", 5)):
        run.fake.queue().attributes[f"ApproximateNumberOfMessages{kind}"] = str(number)
    assert run.producer.depth(run.env) == QueueDepth(3, 5, 4, 0, None)


@pytest.mark.parametrize(
    ("on_failure", "answer", "error"),
    [
        ("retry", None, "give the producer dead_letter=…"),
        ("noop", client_error("QueueDoesNotExist"), "there is no SQS queue 'orders'"),
    ],
    ids=["dead-letter queue", "source"],
)
def test_missing_queue_fails_before_receive(on_failure, answer, error):
    fake = FakeSqs(ManualClock())
    fake.answer = lambda *_: answer
    with pytest.raises(ProducerError, match=error), halves(fake=fake, on_failure=on_failure):
        pass
    assert not fake.requests["ReceiveMessage"]


def test_visibility_timeout_of_0_is_refused():
    producer = SqsProducer(queue_url=URL, visibility_timeout=0)
    with installed(FakeSqs()), pytest.raises(ProducerError, match="hides a message from no"):
        producer.source(ProducerEnv())


# -------------------------------------------------------------------------------------- options


def test_visibility_timeout_is_lease():
    assert SqsProducer(queue_url=URL).lease == 900.0
    assert SqsProducer(queue_url=URL, visibility_timeout=120).lease == 120
    with pytest.raises(OptionsError, match="they are one"):
        SqsProducer(queue_url=URL, visibility_timeout=120, lease=60.0)
    with pytest.raises(OptionsError, match="at most 43200"):
        SqsProducer(queue_url=URL, lease=50_000.0)


def test_lease_is_twice_long_poll_at_least():
    assert SqsProducer(queue_url=URL, wait_time_seconds=20, lease=40.0).lease == 40
    with pytest.raises(OptionsError, match="at least twice wait_time_seconds"):
        SqsProducer(queue_url=URL, wait_time_seconds=20, lease=30.0)


def test_unknown_action_means_noop_with_warning(caplog):
    producer = SqsProducer(queue_url=URL, on_failure="dead-letter")

    assert producer.on_failure == "noop"
    assert "did you mean 'dead_letter'?" in caplog.text


class Orders(Passing):
    producer = SqsProducer(queue_url=FIFO)
    processors = Processors(concurrency=2)
    batchers = {"default": Batcher(engine="python")}


def test_fifo_queue_is_partitioned_by_group_by_default():
    def own(message: Message) -> int:
        return 0

    orders = Orders()
    assert orders.processors.partition_by == orders.producer.partition_of
    assert orders.batchers["default"].partition_by == orders.producer.partition_of
    assert Orders(partition_by=own).processors.partition_by is own
    assert Orders(producer={"queue_url": URL}).processors.partition_by is None


@options(queue_url=FIFO)
def test_messages_of_group_arrive_in_order_in_one_partition(run):
    for number in range(9):
        run.fake.put([f"{number}"], url=FIFO, group=f"g{number % 3}")
    messages = run.take()

    assert len({run.producer.partition_of(message) for message in messages}) == 3
    for group in range(3):
        name = f"g{group}"
        own = [m for m in messages if m.metadata["attributes"]["message_group_id"] == name]
        assert [int(message.data) for message in own] == [group, group + 3, group + 6]


@options(queue_url=FIFO)
def test_fifo_queue_without_groups_warns_once(caplog, run):
    run.fake.put(["a", "b"], url=FIFO)
    assert len(run.take()) == 2
    run.fake.put(["c"], url=FIFO)
    run.clock.advance(5.0)
    assert len(run.source.receive(10, timeout=1)) == 1

    assert caplog.text.count("carry no message group") == 1


def test_receive_emits_telemetry_span(run):
    with recorded_spans("sqs.receive_messages") as spans:
        run.fake.put(["a"])
        run.source.receive(1, timeout=0)
        run.fake.answer = lambda *_: client_error("AccessDenied")
        with pytest.raises(ProducerError):
            run.source.receive(7, timeout=0)
    run.fake.obey()

    assert [end for end, _ in spans] == ["start", "stop", "start", "exception"]
    assert spans[0][1]["demand"] == 1
    assert spans[0][1]["name"] == "pipeline"
    assert len(spans[1][1]["messages"]) == 1
    assert spans[2][1]["demand"] == 7


# -------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("options", "visible", "hidden", "warning"),
    [
        ({"wait_time_seconds": 20}, 500, 120_000, "as many messages in flight as it may have"),
        ({"queue_url": FIFO}, 500, 120_000, "as many messages in flight as it may have"),
        ({"queue_url": FIFO}, 30, 7, "about 30 messages of the FIFO queue"),
        ({}, 0, 120_000, ""),
        ({}, 3, 5, ""),
    ],
)
def test_queue_with_invisible_messages_warns(options, visible, hidden, warning, caplog):
    caplog.set_level(logging.WARNING, "airflow_broadway.producers.sqs")
    with halves(**options) as run:
        run.fake.queue(options.get("queue_url", URL)).attributes |= {
            "ApproximateNumberOfMessages": str(visible),
            "ApproximateNumberOfMessagesNotVisible": str(hidden),
        }

        assert run.take() == []
        assert run.take() == []

        assert run.fake.requests["GetQueueAttributes"] == 2  # at the start, and once later
    assert [warning in message for message in caplog.messages] == ([True] if warning else [])


@pytest.mark.parametrize(
    ("receives", "options", "warning"),
    [
        (3, {}, "a dead letter after 3 receives"),
        (3, {}, "set maxReceiveCount to 5 or more"),
        (6, {"on_failure": "retry", "retry": RetryPolicy(max_attempts=8)}, "its 8 attempts are"),
        (6, {"on_failure": "retry", "retry": RetryPolicy(max_attempts=6)}, ""),
        (6, {"on_failure": "noop", "retry": RetryPolicy(max_attempts=8)}, ""),
    ],
)
def test_redrive_policy_with_too_few_receives_warns(receives, options, warning, caplog):
    fake = FakeSqs(ManualClock())
    policy = {
        "deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:dead",
        "maxReceiveCount": str(receives),
    }
    fake.queue().attributes["RedrivePolicy"] = json.dumps(policy)

    with halves(fake=fake, **options):
        pass

    assert warning in caplog.text
    assert ("attempts are used up" in caplog.text) is warning.startswith("its 8")


@pytest.mark.parametrize(
    ("endpoint", "warned"),
    [
        ("http://sqs.internal:4566", True),
        ("https://sqs.internal:4566", False),
        ("http://127.0.0.1:5000", False),
        ("http://localhost:4566", False),
    ],
)
def test_unencrypted_endpoint_warns_once(endpoint, warned, caplog):
    producer = SqsProducer(queue_url=f"{endpoint}/1/orders", conn_id=None, region_name="eu-west-1")
    checks.warn_of_plain_http.cache_clear()

    for _ in range(2):
        client.boto_client(producer, ProducerEnv()).close()

    assert caplog.text.count("go unencrypted to") == warned
