"""Receiving: requests, polls in flight, budgets, the end."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import pytest

from airflow_broadway import Batcher, Message, Processors, RetryPolicy
from airflow_broadway.core import telemetry
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
from tests.unit.producers.sqs.kit import FIFO, halves, options, take
from tests.waiting import eventually


def asked(fake: FakeSqs) -> list[int]:
    """How many messages each receive asked for."""
    assert fake.log is not None
    return [each["MaxNumberOfMessages"] for action, each in fake.log if action == "ReceiveMessage"]


# ------------------------------------------------------------------------------------ requests


def test_receive_requests_lease_and_custody_attributes():
    request = request_of(SqsProducer(queue_url=URL, lease=90.5), 3)

    assert request == {
        "MaxNumberOfMessages": 3,
        "VisibilityTimeout": 91,
        "MessageSystemAttributeNames": ["ApproximateReceiveCount", "AWSTraceHeader"],
        "MessageAttributeNames": ["All"],
    }
    # A wait of nothing is one too, whatever the queue's own is
    assert request_of(SqsProducer(queue_url=URL, wait_time_seconds=0), 3)["WaitTimeSeconds"] == 0


def test_fifo_receive_has_attempt_id_and_group():
    producer = SqsProducer(queue_name="orders.fifo", wait_time_seconds=20, attribute_names="all")

    first, second = request_of(producer, 10), request_of(producer, 10)

    assert first["ReceiveRequestAttemptId"] != second["ReceiveRequestAttemptId"]
    assert first["WaitTimeSeconds"] == 20
    assert first["MessageSystemAttributeNames"] == ["All"]
    assert (
        "MessageGroupId"
        in request_of(SqsProducer(queue_name="o.fifo"), 1)["MessageSystemAttributeNames"]
    )


def test_metadata_has_requested_attributes_only():
    attributes = {
        "kind": {"DataType": "String", "StringValue": "order"},
        "trace.id": {"DataType": "Binary", "BinaryValue": b"\x00\x01"},
        "other": {"DataType": "Number", "StringValue": "7"},
    }
    with halves(
        attribute_names=["approximate_receive_count"],
        message_attribute_names=["kind", "trace.*"],
        dead_letter="orders-dead",  # for which all of them are asked for
    ) as run:
        [message] = run.take_new(["a"], MessageAttributes=attributes)

    assert message.metadata["attributes"] == {"approximate_receive_count": 1}
    assert message.metadata["message_attributes"] == {
        "kind": {"data_type": "String", "string_value": "order"},
        "trace.id": {"data_type": "Binary", "binary_value": "AAE="},
    }
    kept = json.loads(message.acknowledger.data.properties)
    assert sorted(kept["attributes"]) == ["kind", "other", "trace.id"]


def test_demand_is_split_into_full_receives(run):
    run.fake.put([str(number) for number in range(100)])

    messages = run.source.secure(run.source.receive(25, timeout=0))

    assert len(messages) == 25
    assert asked(run.fake) == [10, 10, 5]


def test_lease_size_is_independent_of_message_count(run):
    run.fake.put([str(number) for number in range(2000)])
    assert len(run.take()) == 2000
    assert len(json.dumps(run.source.lease.to_json())) < 600


# --------------------------------------------------------------------------- several in flight


@options(receive_concurrency=4)
def test_receives_run_concurrently(run):
    run.fake.put([str(number) for number in range(40)])
    together = threading.Barrier(4)

    def answer(action: str, _: dict[str, Any]) -> None:
        if action == "ReceiveMessage" and run.fake.waiting():
            together.wait(timeout=30)

    run.fake.answer = answer

    assert len(run.source.receive(40, timeout=0)) == 40


@options(receive_concurrency=4)
def test_stop_releases_messages_not_handed_out(run):
    run.fake.put([str(number) for number in range(2000)])

    messages = run.source.secure(run.source.receive(1000, timeout=0))
    run.source.close()

    assert 500 <= len(messages) <= 1000
    assert len(run.fake.waiting()) == 2000 - len(messages)
    report = run.settle(messages)
    assert report.acked == len(messages)


@options(receive_concurrency=2, wait_time_seconds=20)
def test_poll_in_progress_completes_and_releases(run):
    asked_for, go_on = threading.Event(), threading.Event()

    def answer(action: str, _: dict[str, Any]) -> Any:
        if action != "ReceiveMessage":
            return None
        if len(asked(run.fake)) == 1:
            return {}  # the first finds nothing: the queue is quiet
        asked_for.set()
        assert go_on.wait(timeout=30)
        return None

    run.fake.answer = answer
    assert list(run.source.receive(10, timeout=0)) == []
    run.clock.advance(5.0)
    assert list(run.source.receive(10, timeout=0.01)) == []  # one poll is still out
    assert asked_for.wait(timeout=30)
    run.fake.put(["late"])
    closing = threading.Thread(target=run.source.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    go_on.set()
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
    first = run.fake.requests["ReceiveMessage"]
    assert first <= 8
    while run.source._polls.flying:  # threads that had not begun
        time.sleep(0.001)
    run.clock.advance(5.0)

    assert list(run.source.receive(1000, timeout=0)) == []

    # It is in its own thread
    eventually(lambda: run.fake.requests["ReceiveMessage"] > first)
    assert run.fake.requests["ReceiveMessage"] == first + 1


def test_in_flight_limit_does_not_end_run(caplog, run):
    run.fake.put([str(number) for number in range(100)])
    run.fake.answer = lambda action, _: (
        client_error("OverLimit") if len(asked(run.fake)) > 2 else None
    )

    assert len(run.take()) == 20

    assert len(asked(run.fake)) == 3
    assert "as many messages in flight as it may have" in caplog.text


@options(max_number_of_messages=1)
def test_receive_of_known_messages_is_not_empty(run):
    run.fake.put(["a", "b"])
    [first] = run.source.secure(run.source.receive(1, timeout=0))
    queue = run.fake.queue()
    queue.ready.appendleft(queue.known[first.message_id])

    [second] = run.source.secure(run.source.receive(1, timeout=0))

    assert second.data == b"b"


@options(receive_concurrency=2)
def test_buffered_message_is_renewed_before_hand_out(run):
    run.fake.put([str(number) for number in range(20)])
    assert len(run.source.receive(20, timeout=0)) == 20
    now = run.clock.now().timestamp()
    run.source._ready = [(now, each) for each in received(run.fake)]
    run.clock.advance(200.0)

    [message] = run.source.secure(run.source.receive(1, timeout=0))

    assert message.data == b"more"
    assert run.fake.entries["ChangeMessageVisibility"] == 1
    until = run.source._receipts._spans[-1][0]
    assert until == run.clock.now().timestamp() + 600


@pytest.mark.parametrize("code", ["ReceiptHandleIsInvalid", "InternalError"])
def test_unrenewable_buffered_message_is_not_handed_out(code, run):
    now = run.clock.now().timestamp()
    run.source._ready = [(now, each) for each in received(run.fake)]
    run.clock.advance(200.0)

    def answer(asked: str, arguments: dict[str, Any]) -> Any:
        entries = arguments.get("Entries", []) if asked == "ChangeMessageVisibility" else []
        failed = [{"Id": each["Id"], "Code": code, "SenderFault": False} for each in entries]
        return {"Successful": [], "Failed": failed} if failed else None

    run.fake.answer = answer

    assert run.take() == []
    run.fake.answer = lambda asked, arguments: None
    run.clock.advance(400.0)  # its hold is over
    assert [each.data for each in run.source.receive(1, timeout=5.0)] == [b"more"]


def received(fake: FakeSqs) -> list[Received]:
    fake.put(["more"])
    answer = fake.receive_message(QueueUrl=URL, MaxNumberOfMessages=1, VisibilityTimeout=600)
    return [Received(raw["MessageId"], raw["ReceiptHandle"], raw) for raw in answer["Messages"]]


# ---------------------------------------------------------------------------------- what fails


def test_short_outage_is_waited_out(caplog, run):
    run.fake.put(["a"])
    run.fake.answer = lambda action, _: (
        client_error("ServiceUnavailable", status=503) if len(asked(run.fake)) < 3 else None
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
    assert len(asked(run.fake)) == 1


def test_redrive_policy_with_few_receives_warns(caplog):
    fake = FakeSqs(ManualClock())
    policy = {"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:dead", "maxReceiveCount": "3"}
    fake.queue().attributes["RedrivePolicy"] = json.dumps(policy)

    with halves(fake=fake):
        pass

    assert "a dead letter after 3 receives" in caplog.text
    assert "set maxReceiveCount to 5 or more" in caplog.text


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
    for which, number in (("", 3), ("NotVisible", 4), ("Delayed", 5)):
        name = f"ApproximateNumberOfMessages{which}"
        run.fake.queue().attributes[name] = str(number)
    assert run.producer.depth(run.env) == QueueDepth(3, 5, 4, 0, None)


def test_missing_dead_letter_queue_fails_before_receive():
    fake = FakeSqs(ManualClock())
    with (
        pytest.raises(ProducerError, match="give the producer dead_letter=…"),
        halves(fake=fake, on_failure="retry"),
    ):
        pass
    assert not fake.requests["ReceiveMessage"]


def test_missing_queue_fails_before_receive():
    fake = FakeSqs(ManualClock())
    fake.answer = lambda action, _: client_error("QueueDoesNotExist")
    with pytest.raises(ProducerError, match="there is no SQS queue 'orders'"), halves(fake=fake):
        pass


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
    standard = Orders(producer={"queue_url": URL})
    assert standard.processors.partition_by is None


def test_messages_of_group_arrive_in_order_in_one_partition():
    with halves(queue_url=FIFO) as run:
        for number in range(9):
            run.fake.put([f"{number}"], url=FIFO, group=f"g{number % 3}")
        messages = take(run.source)

    assert len({run.producer.partition_of(message) for message in messages}) == 3
    for group in range(3):
        name = f"g{group}"
        own = [m for m in messages if m.metadata["attributes"]["message_group_id"] == name]
        assert [int(message.data) for message in own] == [group, group + 3, group + 6]


def test_fifo_queue_without_groups_warns_once(caplog):
    with halves(queue_url=FIFO) as run:
        run.fake.put(["a", "b"], url=FIFO)
        assert len(run.take()) == 2
        run.fake.put(["c"], url=FIFO)
        run.clock.advance(5.0)
        assert len(run.source.receive(10, timeout=1)) == 1

    assert caplog.text.count("carry no message group") == 1


def test_receive_emits_telemetry_span():
    seen: list[tuple[str, dict[str, Any]]] = []
    events = [f"sqs.receive_messages.{end}" for end in ("start", "stop", "exception")]
    handler = telemetry.attach(
        lambda event, _, metadata: seen.append((event, dict(metadata))), events=events
    )
    try:
        with halves() as run:
            run.fake.put(["a"])
            run.source.receive(1, timeout=0)
            run.fake.answer = lambda *_: client_error("AccessDenied")
            with pytest.raises(ProducerError):
                run.source.receive(7, timeout=0)
    finally:
        telemetry.detach(handler)

    assert [event.rpartition(".")[2] for event, _ in seen] == [
        "start",
        "stop",
        "start",
        "exception",
    ]
    assert seen[0][1]["demand"] == 1
    assert seen[0][1]["name"] == "pipeline"
    assert len(seen[1][1]["messages"]) == 1
    assert seen[2][1]["demand"] == 7


# ------------------------------------------------------------------------- what a run looks at


@pytest.mark.parametrize(
    ("options", "visible", "hidden", "said"),
    [
        ({"wait_time_seconds": 20}, 500, 120_000, "as many messages in flight as it may have"),
        ({"queue_url": FIFO}, 500, 120_000, "as many messages in flight as it may have"),
        ({"queue_url": FIFO}, 30, 7, "about 30 messages of the FIFO queue"),
        ({}, 0, 120_000, ""),
        ({}, 3, 5, ""),
    ],
)
def test_queue_with_invisible_messages_warns(options, visible, hidden, said, caplog):
    caplog.set_level(logging.WARNING, "airflow_broadway.producers.sqs")
    with halves(**options) as run:
        run.fake.queue(options.get("queue_url", URL)).attributes |= {
            "ApproximateNumberOfMessages": str(visible),
            "ApproximateNumberOfMessagesNotVisible": str(hidden),
        }

        assert run.take() == []
        assert run.take() == []

        assert run.fake.requests["GetQueueAttributes"] == 2  # at the start, and once since
    assert [said in message for message in caplog.messages] == ([True] if said else [])


def test_redrive_policy_below_max_attempts_warns(caplog):
    fake = FakeSqs(ManualClock())
    policy = {"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:dead", "maxReceiveCount": "6"}
    fake.queue().attributes["RedrivePolicy"] = json.dumps(policy)
    for on_failure, attempts, warned in (
        ("retry", 8, True),
        ("retry", 6, False),
        ("noop", 8, False),
    ):
        caplog.clear()
        with halves(fake=fake, on_failure=on_failure, retry=RetryPolicy(max_attempts=attempts)):
            pass
        assert ("before its 8 attempts are used up" in caplog.text) is warned


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

    assert sum("go unencrypted to" in each for each in caplog.messages) == warned
