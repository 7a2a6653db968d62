"""The model's steps and guards are the code's: names that change there change here too."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.model.bundles import Bundles
from tests.model.mutants import MUTANTS
from tests.model.protocol import CODE
from tests.model.receipts import Receipts
from tests.model.rows import Rows

CUSTODIES = (Rows, Receipts, Bundles)
NAMES = {*CODE.values(), *(name for custody in CUSTODIES for name in custody.code.values())}
GUARDS = {mutant.place for mutant in MUTANTS}


def resolve(name: str) -> Any:
    """Resolves a dotted name in the package."""
    parts = ["airflow_broadway", *name.split(".")]
    for end in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("airflow_broadway"):
                raise
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"there is no {name}")


@pytest.mark.parametrize("name", sorted(NAMES | GUARDS))
def test_names_in_the_model_exist(name):
    assert callable(resolve(name))


def test_a_missing_name_is_detected():
    with pytest.raises(AttributeError):
        resolve("staging.run_folder.StagedRun.publish_it")
