from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from airflow.providers_manager import ProvidersManager

from airflow_broadway.get_provider_info import get_provider_info

INFO: dict[str, Any] = get_provider_info()


def test_airflow_accepts_the_description() -> None:
    manager: Any = ProvidersManager  # untyped
    assert manager().providers["airflow-broadway"].data["name"] == "Broadway"


@pytest.mark.parametrize(
    "module",
    [
        module
        for kind in ("operators", "sensors", "triggers", "hooks")
        for entry in INFO[kind]
        for module in entry["python-modules"]
    ],
)
def test_each_module_that_is_named_is_there(module: str) -> None:
    assert import_module(module).__name__ == module


@pytest.mark.parametrize("entry", INFO["connection-types"], ids=lambda e: e["connection-type"])
def test_a_connection_form_is_that_of_its_hook(entry: dict[str, Any]) -> None:
    module, _, name = entry["hook-class-name"].rpartition(".")
    hook = getattr(import_module(module), name)

    behaviour = {key.replace("-", "_"): v for key, v in entry["ui-field-behaviour"].items()}

    assert (hook.conn_type, hook.hook_name) == (entry["connection-type"], entry["hook-name"])
    assert hook.get_ui_field_behaviour() == behaviour
