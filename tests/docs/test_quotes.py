"""Quotes of docs/producers.md come from the producer that passes the contract."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUOTED = ("tests/contract/folder_producer.py", "tests/contract/test_folder.py")
#: The lines that the page promises of it, at most.
LINES = 250


def test_quoted_code_is_the_tested_code():
    page = (ROOT / "docs" / "producers.md").read_text("utf-8")
    sources = [(ROOT / path).read_text("utf-8") for path in QUOTED]

    quotes = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)

    assert len(quotes) == 4
    for quote in quotes:
        assert any(quote in source for source in sources), quote


def test_the_example_producer_has_the_stated_length():
    assert len((ROOT / QUOTED[0]).read_text("utf-8").splitlines()) < LINES


def test_the_page_names_every_module_of_the_kit():
    page = (ROOT / "docs" / "producers.md").read_text("utf-8")
    kit = ROOT / "airflow_broadway" / "producers" / "kit"

    assert {f"| `{path.stem}` |" in page for path in kit.glob("[a-z]*.py")} == {True}
