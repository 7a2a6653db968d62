from __future__ import annotations

import logging

import pytest

from airflow_broadway.producers.rabbitmq.receive.buffer import Buffer
from airflow_broadway.producers.rabbitmq.receive.quarantine import Aside


def test_the_first_ten_that_are_set_aside_are_logged_and_all_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    buffer = Buffer()
    for number in range(12):
        buffer.add([Aside(f"m{number}", "crashed" if number % 2 else "oversized", "why")])
    assert [text.split()[1] for text in caplog.messages] == [f"m{number}" for number in range(10)]
    assert buffer.set_aside == {"oversized": 6, "crashed": 6}
