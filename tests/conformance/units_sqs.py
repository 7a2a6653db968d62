"""The unit cases of the area ``sqs``, with a client that records its requests.

Broadway deletes in the process of the stage.  Here the run's settler passes verdicts to the
custodian, which sends the delete requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Settler
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.producers.sqs.adapter import options_of_receive
from tests.conformance.observed import Case, logged
from tests.fake_sqs import URL, FakeSqs, client_error, installed


def _data(given: Any) -> Any:
    return given["data"] if isinstance(given, dict) else given


def _settle(
    fake: FakeSqs,
    options: dict[str, Any],
    successful: list[Any],
    failed_items: list[Any],
    *,
    ends: bool = False,
) -> list[Any]:
    """Settles a stage's result; returns the data of the messages of each delete request.

    :param ends: Whether the run ends, which retries rejected deletes.
    """
    producer = SqsProducer(queue_url=URL, conn_id=None, receive_concurrency=1, **options)
    fake.put([str(_data(message)) for message in (*successful, *failed_items)])
    env = ProducerEnv()
    with installed(fake):
        source = producer.source(env)
        taken: list[Message] = []
        while portion := source.secure(source.receive(100, timeout=0)):
            taken += portion
        by_data = {message.data.decode(): message for message in taken}
        receipts = {message.metadata["receipt_handle"]: message for message in taken}
        settler = Settler(lambda: producer.custodian(env), lambda: source.lease, threaded=False)
        acknowledger = RunAcknowledger(producer, settler)
        settler.hold(taken)

        def make_message(item: Any) -> Message:
            message = by_data[str(_data(item))]
            ref = AckRef(acknowledger, "ref", message.acknowledger.data)
            own = item["configure_ack"] if isinstance(item, dict) else {}
            return message.with_acknowledger(ref).configure_ack(**own)

        failed = [make_message(message).failed("") for message in failed_items]
        acknowledger.ack("ref", [make_message(message) for message in successful], failed)
        settler.tick(force=True)
        if ends:
            settler.finish()
        source.close()
    assert fake.log is not None
    return [
        [int(receipts[entry["ReceiptHandle"]].data) for entry in arguments["Entries"]]
        for action, arguments in fake.log
        if action == "DeleteMessage"
    ]


def deletes(case: Case) -> None:
    inputs = case["given"]
    options = {name: inputs[name] for name in ("on_success", "on_failure") if name in inputs}
    settled = _settle(FakeSqs(), options, inputs["successful"], inputs.get("failed", []))
    assert settled == case["expect"]["delete_requests"]


def requests(case: Case) -> None:
    # Without the visibility timeout and the receive count, which every receive requests.
    inputs = dict(case["given"])
    demands = inputs.pop("demands")
    producer = SqsProducer(queue_url=URL, **inputs)
    assert [options_of_receive(producer, demand) for demand in demands] == case["expect"][
        "receive_requests"
    ]


def metadata(case: Case) -> None:
    given, expect = case["given"]["message"], case["expect"]
    names = {
        "message_id": "MessageId",
        "receipt_handle": "ReceiptHandle",
        "md5_of_body": "MD5OfBody",
        "body": "Body",
    }
    raw = {theirs: given[ours] for ours, theirs in names.items()}
    fake = FakeSqs()
    answers = [{"Messages": [raw]}]
    fake.answer = lambda action, _: (
        (answers.pop() if answers else {"Messages": []}) if action == "ReceiveMessage" else None
    )
    with installed(fake):
        source = SqsProducer(queue_url=URL, receive_concurrency=1).source(ProducerEnv())
        [message] = source.receive(10, timeout=0)
        source.close()
    assert message.data.decode() == expect["data"]
    assert sorted(message.metadata) == sorted(expect["metadata_keys"])
    for name in ("message_id", "receipt_handle", "md5_of_body"):
        assert message.metadata[name] == given[name]
    assert not message.metadata["attributes"]
    assert not message.metadata["message_attributes"]
    assert ("body" not in message.metadata) == expect["body_not_in_metadata"]


def bounds(case: Case) -> None:
    assert case["expect"]["each_raises"]
    for name, value in case["given"]["invalid"]:
        options: dict[str, Any] = {"queue_url": URL, name: value}
        with pytest.raises(BroadwayError, match=name):
            SqsProducer(**options)


def failing_delete(case: Case) -> None:
    # Broadway's stage logs errors of the acknowledger.  Here the custodian logs and reports them.
    given, expect = case["given"], case["expect"]
    fake = FakeSqs()
    numbers = iter(range(1, 1000))

    def answer(action: str, _: dict[str, Any]) -> Any:
        if action == "DeleteMessage" and next(numbers) == given["delete_fails_on"]:
            return client_error("AccessDenied", status=403)
        return None

    fake.answer = answer
    data = list(range(given["successful"]))
    with logged(logging.ERROR) as errors:
        attempted = _settle(fake, {}, data, [])
    assert len(attempted) == expect["delete_requests_attempted"]
    assert bool(errors) == expect["error_logged"]

    # Failed deletes are recorded by id and retried at the end of the run.
    numbers = iter(range(1, 1000))
    fake = FakeSqs()
    fake.answer = answer
    attempted = _settle(fake, {}, data, [], ends=True)
    done = [entry for request in attempted[:1] + attempted[2:] for entry in request]
    assert sorted(done) == data


SQS: dict[str, Callable[[Case], None]] = {
    "sqs-002": deletes,
    "sqs-003": deletes,
    "sqs-004": deletes,
    "sqs-005": requests,
    "sqs-008": metadata,
    "sqs-009": deletes,
    "sqs-010": bounds,
    "sqs-011": failing_delete,
}
