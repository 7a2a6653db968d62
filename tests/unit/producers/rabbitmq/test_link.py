from __future__ import annotations

import logging

import pytest

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.connection import Address
from airflow_broadway.producers.rabbitmq.link import Link

NOBODY = Address(host="127.0.0.1", port=1)


@pytest.mark.parametrize(
    ("given", "then"), [(logging.NOTSET, logging.CRITICAL), (logging.DEBUG, logging.DEBUG)]
)
def test_pika_keeps_to_itself_unless_somebody_has_set_its_level(given: int, then: int) -> None:
    pika = logging.getLogger("pika")
    before = pika.level
    pika.setLevel(given)
    try:
        with pytest.raises(ProducerUnavailable, match="cannot be reached"):
            Link(NOBODY)
        assert pika.level == then
    finally:
        pika.setLevel(before)


def test_what_it_could_not_do_is_told_once_in_our_own_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ProducerUnavailable) as raised:
        Link(NOBODY)

    assert str(raised.value).startswith("RabbitMQ at 127.0.0.1:1 cannot be reached: ")
    assert caplog.messages == []
