from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.receive import source


@pytest.mark.parametrize(("given", "warned"), [({}, True), ({"on_failure": "retry"}, False)])
def test_a_run_warns_if_it_is_not_told_what_becomes_of_failures(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    warned: bool,
) -> None:
    monkeypatch.setattr(source, "RabbitSource", lambda *_: None)
    RabbitMQProducer(queue="q", **given).source(ProducerEnv())
    assert ("on_failure should be specified" in caplog.text) is warned
