"""The unit cases of the area ``pubsub``, compared by the requests to a server.

Broadway acknowledges in the process of the stage.  Here the run's settler passes verdicts to the
custodian, which sends the requests.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Settler
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.pubsub import PubSubProducer
from tests.conformance.observed import Case, logged
from tests.pubsub_server import PubSubServer, StubServer
from tests.pubsub_stub.errors import Refused
from tests.pubsub_witness import RecordedRequest, Witness


def _settle(server: PubSubServer, successful: int, failed: int, **options: Any) -> list[list[Any]]:
    """Settles a stage's result; returns the requests in the cases' format."""
    topic = server.topic()
    name = server.subscription(topic)
    server.publish(topic, [b"%d" % number for number in range(successful + failed)])
    env = ProducerEnv()
    with Witness(server) as requests_log:
        producer = PubSubProducer(
            subscription=name, receive_concurrency=1, **requests_log.options, **options
        )
        source = producer.source(env)
        taken: list[Message] = []
        while len(taken) < successful + failed:
            taken += source.secure(source.receive(1_000, timeout=5.0))
        settler = Settler(lambda: producer.custodian(env), lambda: source.lease, threaded=False)
        acknowledger = RunAcknowledger(producer, settler)
        settler.hold(taken)
        messages = [
            message.with_acknowledger(AckRef(acknowledger, "ref", message.acknowledger.data))
            for message in taken
        ]
        before = len(requests_log.requests)
        acknowledger.ack(
            "ref", messages[:successful], [message.failed("") for message in messages[successful:]]
        )
        settler.tick(force=True)
        requests = [
            _describe_request(request)
            for request in requests_log.requests[before:]
            if request.call != "Pull"
        ]
        source.close()
    return requests


def _describe_request(call: RecordedRequest) -> list[Any]:
    """Returns a request with ack ids in the cases' format."""
    count = len(call.request.ack_ids)
    if call.call == "Acknowledge":
        return ["acknowledge", count]
    assert call.call == "ModifyAckDeadline"
    return ["put_deadline", count, call.request.ack_deadline_seconds]


def requests(case: Case, server: PubSubServer) -> None:
    inputs = case["given"]
    options = {name: inputs[name] for name in ("on_success", "on_failure") if name in inputs}
    settled = _settle(server, inputs["successful"], inputs["failed"], **options)
    # Requests are concurrent, so their order is random.
    assert sorted(settled) == sorted(case["expect"]["requests"])


def values(case: Case) -> None:
    for value, expected in zip(case["given"]["values"], case["expect"]["normalised"], strict=True):
        result = tuple(value) if isinstance(value, list) else value
        if expected == "error":
            with pytest.raises(OptionsError, match="on_success"):
                PubSubProducer(subscription="orders", on_success=result)
            continue
        # Options are text, so that they can be serialized: nack(100) is (nack, 100).
        expected_option = expected
        if isinstance(expected, list):
            expected_option = f"nack({expected[1]})" if expected[1] else "nack"
        assert (
            PubSubProducer(subscription="orders", on_success=result).on_success == expected_option
        )


def pulls(case: Case, server: PubSubServer) -> None:
    inputs = case["given"]
    topic = server.topic()
    name = server.subscription(topic)
    server.publish(topic, [b"x"] * inputs["demand"])
    with Witness(server) as requests_log:
        producer = PubSubProducer(
            subscription=name,
            max_number_of_messages=inputs["max_number_of_messages"],
            receive_concurrency=1,
            **requests_log.options,
        )
        source = producer.source(ProducerEnv())
        source.secure(source.receive(inputs["demand"], timeout=5.0))
        source.close()
        demands = [
            entry.request.max_messages for entry in requests_log.requests if entry.call == "Pull"
        ]
    assert demands
    assert set(demands) == {case["expect"]["body"]["maxMessages"]}


def failing_acknowledgement(case: Case) -> None:
    # Broadway logs an error.  Here it is a warning, and the request is retried at the run's end.
    assert case["given"]["status"] == 503
    assert case["expect"]["result"] == "ok"
    with logged() as warnings, StubServer() as server:
        gone = Refused("UNAVAILABLE", "not now")
        server.broker.answer = lambda call, _: gone if call == "Acknowledge" else None
        settled = _settle(server, 3, 0, request_timeout=0.2)
    assert ["acknowledge", 3] in settled
    assert any("Acknowledge" in text for text in warnings)


def metadata(case: Case, server: PubSubServer) -> None:
    given, expect = case["given"], case["expect"]
    topic = server.topic()
    producer = PubSubProducer(subscription=server.subscription(topic), **server.options)
    # gRPC bodies are bytes; a message without a body needs an attribute.
    server.publish(topic, [b64decode(given["data"])], attributes={"a": "b"}, ordering_key="k")
    server.publish(topic, [b""], attributes={"a": "b"})
    source = producer.source(ProducerEnv())
    taken: list[Message] = []
    while len(taken) < 2:
        taken += source.secure(source.receive(10, timeout=5.0))
    source.close()
    full, empty = sorted(taken, key=lambda message: len(message.data), reverse=True)
    assert full.data.decode() == expect["data"]
    assert empty.data == b""
    assert set(expect["metadata_keys"]) <= set(full.metadata)
    assert full.metadata["attributes"] == {"a": "b"}
    assert full.metadata["orderingKey"] == "k"
    assert full.metadata["messageId"] == full.message_id
    assert full.metadata["deliveryAttempt"] is None
    assert full.metadata["publishTime"]


#: Cases for any Pub/Sub server.
AT_ANY: dict[str, Callable[[Case, PubSubServer], None]] = {
    "ps-001": requests,
    "ps-002": requests,
    "ps-003": requests,
    "ps-006": pulls,
    "ps-009": metadata,
}


def _at_stub(check: Callable[[Case, PubSubServer], None], case: Case) -> None:
    with StubServer() as server:
        check(case, server)


PUBSUB: dict[str, Callable[[Case], None]] = {
    **{name: partial(_at_stub, check) for name, check in AT_ANY.items()},
    "ps-004": values,
    "ps-008": failing_acknowledgement,
}
