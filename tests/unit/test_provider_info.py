from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from airflow.providers_manager import ProvidersManager

from airflow_broadway.core.model.connections import Connection
from airflow_broadway.get_provider_info import get_provider_info
from airflow_broadway.producers.rabbitmq.amqp.address import address_of

INFO: dict[str, Any] = get_provider_info()


def test_airflow_accepts_the_provider_info():
    manager: Any = ProvidersManager  # untyped
    assert manager().providers["airflow-broadway"].data["name"] == "Broadway"


KINDS = ("operators", "sensors", "triggers", "hooks")
ENTRIES = [entry for kind in KINDS for entry in INFO[kind]]


@pytest.mark.parametrize("module", [name for entry in ENTRIES for name in entry["python-modules"]])
def test_modules_of_the_provider_info_exist(module):
    assert import_module(module).__name__ == module


@pytest.mark.parametrize("entry", INFO["connection-types"], ids=lambda e: e["connection-type"])
def test_connection_form_is_that_of_its_hook(entry):
    module, _, name = entry["hook-class-name"].rpartition(".")
    hook = getattr(import_module(module), name)

    behaviour = {key.replace("-", "_"): v for key, v in entry["ui-field-behaviour"].items()}

    assert (hook.conn_type, hook.hook_name) == (entry["connection-type"], entry["hook-name"])
    assert hook.get_ui_field_behaviour() == behaviour


def test_fields_of_the_rabbitmq_form_are_known_extras():
    [entry] = [e for e in INFO["connection-types"] if e["connection-type"] == "rabbitmq"]
    fields = {
        "tls": True,
        "tls_ca": "/ca.pem",
        "tls_cert": "/cert.pem",
        "tls_key": "/key.pem",
        "tls_server_name": "broker",
        "auth_mechanism": "external",
        "management_url": "https://broker",
        "heartbeat": 5,
        "timeout": 6.0,
        "blocked_connection_timeout": 7.0,
    }
    assert fields.keys() == entry["conn-fields"].keys()

    def address(**extra):
        connection = Connection(conn_id="c", conn_type="rabbitmq", host="b", extra=extra)
        return address_of(connection, name="n")

    for name in fields:
        without = {key: value for key, value in fields.items() if key != name}
        if name == "tls_cert":
            without["auth_mechanism"] = "plain"
        assert address(**fields) != address(**without) or name == "tls"
    assert address(tls=True) != address()


def test_airflow_shows_the_fields_of_the_form():
    manager: Any = ProvidersManager  # untyped
    widgets = manager().connection_form_widgets

    assert widgets["extra__rabbitmq__tls_ca"].field_name == "tls_ca"
