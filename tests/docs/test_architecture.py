"""``docs/architecture.md`` names what exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")

NAMES = sorted(
    set(
        re.findall(
            r"`((?:adapters|cli|core|hooks|operators|plugin|producers|runs|sensors|spark|staging|submit|testing"
            r"|triggers)(?:\.\w+)+)(?:\(\))?`",
            TEXT,
        )
    )
)


@pytest.mark.parametrize("name", NAMES)
def test_named_files_and_objects_exist(name):
    parts = ["airflow_broadway", *name.split(".")]
    for end in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("airflow_broadway"):
                raise
            continue
        for part in parts[end:]:
            target = getattr(target, part)
        return


def test_the_document_names_functions():
    assert len(NAMES) > 40
