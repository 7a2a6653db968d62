from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("airflow")

from airflow_broadway.hooks.rabbitmq import RabbitMQHook


def hook_of(monkeypatch: pytest.MonkeyPatch, uri: str) -> RabbitMQHook:
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", uri)
    return RabbitMQHook("rabbit")


def test_connection_becomes_address(monkeypatch):
    hook = hook_of(monkeypatch, "rabbitmq://me:s3cret@broker:5673/flights?heartbeat=10")

    address = hook.address

    assert (address.host, address.port, address.login) == ("broker", 5673, "me")
    assert (address.virtual_host, address.heartbeat) == ("flights", 10)
    assert "s3cret" not in repr(address)


def test_connection_test_reports_error(monkeypatch):
    found: Any = hook_of(monkeypatch, "rabbitmq://me:s3cret@127.0.0.1:1/").test_connection()

    assert found[0] is False
    assert "cannot be reached" in found[1]
    assert "s3cret" not in found[1]
