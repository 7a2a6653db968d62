"""The unit cases of the area ``pubsub``, at a Pub/Sub of the tests' own that keeps its requests.

Broadway acknowledges in the stage's own process.  Here a stage's verdicts go through a run's
settler to the custodian, and the requests are those that come out there.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Settler
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.pubsub import PubSubProducer
from tests.conformance.observed import Case
from tests.pubsub_server import StubServer
from tests.pubsub_stub.errors import Refused


def _settled(server: StubServer, good: int, bad: int, **options: Any) -> list[list[Any]]:
    """Settle one stage's result; the requests that come of it."""
    topic = server.topic()
    producer = PubSubProducer(
        subscription=server.subscription(topic),
        receive_concurrency=1,
        **server.options,
        **options,
    )
    server.publish(topic, [b"%d" % number for number in range(good + bad)])
    env = ProducerEnv()
    source = producer.source(env)
    taken: list[Message] = []
    while len(taken) < good + bad:
        taken += source.secure(source.receive(1_000, timeout=5.0))
    settler = Settler(lambda: producer.custodian(env), lambda: source.lease, threaded=False)
    acknowledger = RunAcknowledger(producer, settler)
    settler.hold(taken)
    made = [
        each.with_acknowledger(AckRef(acknowledger, "ref", each.acknowledger.data))
        for each in taken
    ]
    with _requests(server) as requests:
        failed = [each.failed("") for each in made[good:]]
        acknowledger.ack("ref", made[:good], failed)
        settler.tick(force=True)
    source.close()
    return requests


@contextmanager
def _requests(server: StubServer) -> Iterator[list[list[Any]]]:
    """What is asked about ids meanwhile, as the cases write it."""
    found: list[list[Any]] = []
    before = server.broker.answer

    def answer(call: str, request: Any) -> Refused | None:
        if call == "Acknowledge":
            found.append(["acknowledge", len(request.ack_ids)])
        if call == "ModifyAckDeadline":
            found.append(["put_deadline", len(request.ack_ids), request.ack_deadline_seconds])
        return before(call, request)

    server.broker.answer = answer
    yield found
    server.broker.answer = before


def requests(case: Case) -> None:
    given = case["given"]
    options = {name: given[name] for name in ("on_success", "on_failure") if name in given}
    with StubServer() as server:
        found = _settled(server, given["successful"], given["failed"], **options)
    # Requests go side by side: which of them comes first is chance.
    assert sorted(found) == sorted(case["expect"]["requests"])


def values(case: Case) -> None:
    for value, expected in zip(case["given"]["values"], case["expect"]["normalised"], strict=True):
        given = tuple(value) if isinstance(value, list) else value
        if expected == "error":
            with pytest.raises(OptionsError, match="on_success"):
                PubSubProducer(subscription="orders", on_success=given)
            continue
        # Ours are text, so that they can be kept: nack(100) is (nack, 100), and nack (nack, 0).
        wanted = expected
        if isinstance(expected, list):
            wanted = f"nack({expected[1]})" if expected[1] else "nack"
        assert PubSubProducer(subscription="orders", on_success=given).on_success == wanted


def pulls(case: Case) -> None:
    given = case["given"]
    most = given["max_number_of_messages"]
    asked: list[int] = []

    def answer(call: str, request: Any) -> None:
        if call == "Pull":
            asked.append(request.max_messages)

    with StubServer() as server:
        server.broker.answer = answer
        topic = server.topic()
        producer = PubSubProducer(
            subscription=server.subscription(topic),
            max_number_of_messages=most,
            receive_concurrency=1,
            **server.options,
        )
        server.publish(topic, [b"x"] * given["demand"])
        source = producer.source(ProducerEnv())
        source.secure(source.receive(given["demand"], timeout=5.0))
        source.close()
    assert asked
    assert set(asked) == {case["expect"]["body"]["maxMessages"]}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def failing_acknowledgement(case: Case) -> None:
    # Broadway logs an error and goes on.  Here it is a warning: it is tried again at the run's end.
    assert case["given"]["status"] == 503
    assert case["expect"]["result"] == "ok"
    log, told = logging.getLogger("airflow_broadway"), _Warnings()
    log.addHandler(told)
    try:
        with StubServer() as server:
            gone = Refused("UNAVAILABLE", "not now")
            server.broker.answer = lambda call, _: gone if call == "Acknowledge" else None
            found = _settled(server, 3, 0, request_timeout=0.2)
    finally:
        log.removeHandler(told)
    assert ["acknowledge", 3] in found
    assert any("Acknowledge" in each.getMessage() for each in told.records)


def metadata(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    with StubServer() as server:
        topic = server.topic()
        producer = PubSubProducer(subscription=server.subscription(topic), **server.options)
        # Over gRPC a body is bytes; without one a message needs an attribute.
        server.publish(topic, [b64decode(given["data"])], attributes={"a": "b"}, ordering_key="k")
        server.publish(topic, [b""], attributes={"a": "b"})
        source = producer.source(ProducerEnv())
        taken: list[Message] = []
        while len(taken) < 2:
            taken += source.secure(source.receive(10, timeout=5.0))
        source.close()
    full, empty = sorted(taken, key=lambda each: len(each.data), reverse=True)
    assert full.data.decode() == expect["data"]
    assert empty.data == b""
    assert set(expect["metadata_keys"]) <= set(full.metadata)
    assert full.metadata["attributes"] == {"a": "b"}
    assert full.metadata["orderingKey"] == "k"
    assert full.metadata["messageId"] == full.message_id
    assert full.metadata["deliveryAttempt"] is None
    assert full.metadata["publishTime"]


PUBSUB: dict[str, Callable[[Case], None]] = {
    "ps-001": requests,
    "ps-002": requests,
    "ps-003": requests,
    "ps-004": values,
    "ps-006": pulls,
    "ps-008": failing_acknowledgement,
    "ps-009": metadata,
}
