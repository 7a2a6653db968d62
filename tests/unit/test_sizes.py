"""Modules are small enough to be read as a whole."""

from __future__ import annotations

from pathlib import Path

import airflow_broadway

ROOT = Path(airflow_broadway.__file__).parent
MOST_LINES = 450


def test_no_module_is_long() -> None:
    lengths = {
        str(module.relative_to(ROOT)): len(module.read_text("utf-8").splitlines())
        for module in ROOT.rglob("*.py")
    }

    assert len(lengths) > 100
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}
