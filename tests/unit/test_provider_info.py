from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import airflow
import jsonschema
import pytest
from airflow.cli.cli_parser import get_parser
from airflow.providers.common.compat.sdk import BaseOperator
from airflow.providers_manager import ProvidersManager
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

import airflow_broadway
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


@pytest.mark.parametrize("name", ["provider_info", "provider.yaml"])
def test_provider_info_is_valid_by_the_schemas_of_airflow(name):
    schema = json.loads((Path(airflow.__file__).parent / f"{name}.schema.json").read_text())
    info = INFO
    if name == "provider.yaml":  # the fields that only a provider in Airflow's repository has
        schema["required"] = ["name", "package-name", "description"]
        pairs = INFO["integrations"]
        # There a logo is a file of the documentation; here the API server has it.
        info = {**INFO, "integrations": [{**p, "logo": "/integration-logos/x.svg"} for p in pairs]}

    jsonschema.validate(info, schema)


def test_integrations_are_complete():
    names = {entry["integration-name"] for entry in INFO["integrations"]}
    assert {entry["integration-name"] for entry in ENTRIES} == names
    for entry in INFO["integrations"]:
        for guide in entry["how-to-guide"]:
            assert (ROOT / guide.removeprefix("/")).is_file()
    [logo] = [entry["logo"] for entry in INFO["integrations"] if "logo" in entry]
    assert (ROOT / "airflow_broadway/plugin" / logo.removeprefix("/broadway/")).is_file()


ROOT = Path(airflow_broadway.__file__).parents[1]
OPERATORS = [
    value
    for kind in ("operators", "sensors")
    for entry in INFO[kind]
    for module in entry["python-modules"]
    for value in vars(import_module(module)).values()
    if inspect.isclass(value) and issubclass(value, BaseOperator) and value.__module__ == module
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda cls: cls.__name__)
def test_templates_and_links_follow_the_conventions_of_airflow(operator):
    arguments = {
        name for cls in operator.__mro__ for name in inspect.signature(cls.__init__).parameters
    }
    links = operator.operator_extra_links

    # Airflow renders the attribute of the argument's name
    assert set(operator.template_fields) <= arguments
    assert operator.template_fields_renderers.keys() <= set(operator.template_fields)
    assert set(operator.template_fields_renderers.values()) <= RENDERERS
    assert operator.__name__.endswith(("Operator", "Sensor"))
    assert {f"{type(link).__module__}.{type(link).__name__}" for link in links} <= set(
        INFO["extra-links"]
    )
    assert len({link.name for link in links}) == len(links)
    assert {link.xcom_key for link in links} == {f"_link_{type(link).__name__}" for link in links}


#: The names of Airflow's template renderers that need no other provider.
RENDERERS = {"bash", "bash_command", "doc", "doc_json", "doc_md", "doc_rst", "doc_yaml", "json"}


@pytest.mark.parametrize("entry", INFO["connection-types"], ids=lambda e: e["connection-type"])
def test_hook_takes_the_connection_id_by_its_own_name(entry):
    hook = resolve_name(entry["hook-class-name"])

    parameters = inspect.signature(hook).parameters
    assert hook.conn_name_attr.endswith("_conn_id")
    assert parameters[hook.conn_name_attr].default == hook.default_conn_name


def test_airflow_discovers_queues_and_asset_uris():
    manager: Any = ProvidersManager  # untyped
    runtime: Any = ProvidersManagerTaskRuntime
    schemes = {scheme for entry in INFO["asset-uris"] for scheme in entry["schemes"]}

    assert set(INFO["queues"]) <= set(manager().queue_class_names)
    assert schemes <= runtime().asset_uri_handlers.keys()
    assert schemes <= runtime().asset_to_openlineage_converters.keys()
    assert {"broadway+rabbitmq", "broadway+sqlite"} <= runtime().asset_factories.keys()


def test_command_of_airflow_runs_our_commands(tmp_path, capsys):
    args = get_parser().parse_args(
        ["broadway", "runs", "--json", "--staging", f"file://{tmp_path}"]
    )

    with pytest.raises(SystemExit) as ended:
        args.func(args)

    assert (ended.value.code, json.loads(capsys.readouterr().out)) == (0, [])
