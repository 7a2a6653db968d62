from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.model.options import override
from airflow_broadway.producers.rabbitmq import Qos, RabbitMQProducer


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "queue"),
        ({"queue": ""}, "queue"),
        ({"queue": "q", "uri": "amqp://guest:secret@host"}, "uri"),
        ({"queue": "q", "uri": "amqp://host", "conn_id": "c"}, "conn_id"),
        ({"queue": "q", "on_failure": "wat"}, "on_failure"),
        ({"queue": "q", "consume_options": {"no_ack": True}}, "consume_options"),
        ({"queue": "q", "declare": {"auto_delete": True}}, "declare"),
        ({"queue": "q", "declare": {"exclusive": True}}, "declare"),
        ({"queue": "q", "metadata": ["colour"]}, "metadata"),
        ({"queue": "q", "bindings": [("exchange",)]}, "bindings"),
        ({"queue": "q", "backoff_min": 5.0, "backoff_max": 1.0}, "backoff_min"),
        ({"queue": "q", "custody": "staged"}, "custody"),
        ({"queue": "q", "backoff_type": "linear"}, "backoff_type"),
        ({"queue": "q", "prefetch": 5}, "prefetch"),
    ],
)
def test_invalid_option_is_named(options, name):
    with pytest.raises(OptionsError, match=rf"RabbitMQProducer\.{name}"):
        RabbitMQProducer(**options)


def message(*, attempt: int = 1, redelivered: bool = False, **delivery: Any) -> Message:
    return Message(
        b"",
        attempt=attempt,
        redelivered=redelivered,
        acknowledger=AckRef(None, None, Delivery(**delivery)),
        status=Status("failed", "why"),
    )


def test_retry_counts_attempts_but_reject_and_requeue_does_not():
    retry = RabbitMQProducer(queue="q", on_failure="retry")
    always = RabbitMQProducer(queue="q", on_failure="reject_and_requeue")
    worn = message(attempt=99, redelivered=True)

    assert retry.verdict(worn, failed=True, stage="batch").action is Action.DEAD_LETTER
    assert always.verdict(worn, failed=True, stage="batch") == Verdict(
        Action.RETRY, 0.0, "why", "batch"
    )


def test_options_are_merged_per_producer_and_checked():
    producer = RabbitMQProducer(
        queue="q", merge_options=lambda index: {"qos": {"prefetch_count": 10 + index}}
    )

    assert producer.merged(3).qos.prefetch_count == 13
    assert producer.qos == Qos()
    wrong = RabbitMQProducer(queue="q", merge_options=lambda index: {"colour": index})
    with pytest.raises(OptionsError, match=r"merge_options\.colour"):
        wrong.merged(0)


def test_direct_qos_option_error_names_its_place():
    with pytest.raises(OptionsError, match=r"give it as qos=Qos\(prefetch_count=…\)$"):
        RabbitMQProducer(queue="q", prefetch_count=5)  # type: ignore[call-arg]
    producer = RabbitMQProducer(queue="q")
    with pytest.raises(OptionsError, match=r"'producer\.prefetch_count' .*give it as qos=Qos\("):
        override(producer, {"prefetch_count": 5}, "producer")
