"""The unit cases of the area ``rabbitmq``.

Broadway acknowledges on the channel that delivered, one message at a time.  Here a verdict is
carried out later and elsewhere, so a case's calls are read as verdicts: ``ack`` is ``ACK``, a
reject with requeue is a ``RETRY`` at once, and without a ``DEAD_LETTER``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_broadway.core.acknowledger import RunAcknowledger
from airflow_broadway.core.custody import Action, Delivery, Verdict
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.core.settler import Tally
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.backoff import Backoff, bounds
from tests.conformance.observed import Case


def call_of(verdict: Verdict) -> list[Any]:
    """The call of Broadway's client that a verdict stands for."""
    if verdict.action is Action.ACK:
        return ["ack"]
    assert verdict.delay == 0
    return ["reject", {"requeue": verdict.action is Action.RETRY}]


def message(producer: RabbitMQProducer, *, redelivered: bool = False) -> Message:
    acknowledger = RunAcknowledger(producer, Tally())
    return Message(
        b"", redelivered=redelivered, acknowledger=AckRef(acknowledger, "ref", Delivery())
    )


def actions(case: Case) -> None:
    calls = []
    for action, redelivered in case["given"]["table"]:
        producer = RabbitMQProducer(queue="test", on_failure=action)
        failed = message(producer, redelivered=redelivered).failed("why")
        calls.append(call_of(producer.verdict(failed, failed=True, stage="process")))
    assert calls == case["expect"]["calls"]


def defaults(case: Case) -> None:
    # Broadway warns when on_failure is not given; here the default is no more than that.
    producer = RabbitMQProducer(**case["given"]["options"])
    expect = case["expect"]
    assert (producer.on_success, producer.on_failure) == (
        expect["on_success"],
        expect["on_failure"],
    )


def settings(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    producer = RabbitMQProducer(
        queue="test", on_success=given["on_success"], on_failure=given["on_failure"]
    )
    calls = []
    for each, error in zip(given["messages"], expect["errors"], strict=True):
        made = message(producer)
        failed = each["outcome"] == "fail"
        try:
            made = made.configure_ack(**each["configure"])
        except OptionsError:  # raised in handle_message: the message fails
            assert error is not None
            failed = True
        else:
            assert error is None
        if failed:
            made = made.failed("why")
        calls.append(call_of(producer.verdict(made, failed=failed, stage="process"))[0])
    assert calls == expect["calls"]


def no_ack(case: Case) -> None:
    # A consumer without acknowledgements loses what a crash finds unhandled: refused, not offered.
    with pytest.raises(OptionsError, match="no_ack would lose messages"):
        RabbitMQProducer(queue="test", **case["given"])


def exponential(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    backoff = Backoff(given["type"], given["min"] / 1000, given["max"] / 1000)
    draws = [round(1000 * (backoff.next() or 0)) for _ in range(given["draws"])]
    assert draws == expect["delays"]
    backoff.reset()
    assert round(1000 * (backoff.next() or 0)) == expect["after_reset"]


def partial_bounds(case: Case) -> None:
    for given, wanted in zip(case["given"]["options"], case["expect"]["bounds"], strict=True):
        low, high = given.get("min"), given.get("max")
        made = bounds(low and low / 1000, high and high / 1000)
        assert [round(1000 * each) for each in made] == wanted
    with pytest.raises(OptionsError, match="backoff_min"):
        bounds(1.0, 0.5)
    assert Backoff("stop", *bounds(None, None)).next() is None


RABBITMQ: dict[str, Callable[[Case], None]] = {
    "rmq-001": actions,
    "rmq-002": defaults,
    "rmq-003": settings,
    "rmq-005": no_ack,
    "rmq-007": exponential,
    "rmq-008": partial_bounds,
}
