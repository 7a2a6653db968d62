"""Each promise of ``docs/reliability.md`` stands in its table with the tests of its claims."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLAIMS = ROOT / "tests" / "docs" / "claims" / "reliability.toml"


def test_the_table_lists_each_promise_with_its_tests():
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    promised = text.split("## Guarantees")[1].split("\n## ")[0]
    promises = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", promised, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| (\d+)\. .+? \| (.+) \|$", text, re.MULTILINE))
    claims = tomllib.loads(CLAIMS.read_text("utf-8"))["claim"]

    assert [number for number, _ in promises] == list(rows)
    for number, promise in promises:
        words = " ".join(promise.split())
        tests = {test for claim in claims if claim["says"] in words for test in claim["shown_by"]}
        listed = {f"tests/{name}" for name in re.findall(r"`([^`]+)`", rows[number])}
        assert listed == tests, f"promise {number}"
        assert tests
