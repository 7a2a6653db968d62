"""Lists that stand in a document and in the code are the same."""

from __future__ import annotations

import re
from pathlib import Path

import airflow_broadway
from tests.order import LONGEST, ONE_SPARK

ROOT = Path(__file__).parents[2]
STAGES = [Path(airflow_broadway.__file__).parent / room for room in ("core", "spark")]

#: The response of a limiter to its caller, which is never logged.
NOT_LOGGED = {"rate_limiting_not_enabled"}


def test_logged_error_codes_match_the_guide():
    text = (ROOT / "docs" / "semantics.md").read_text("utf-8")
    [listed] = re.findall(
        r"has a `code` \(an extra of the log record\): (.*?)\.\n", text, re.DOTALL
    )
    sources = "\n".join(path.read_text("utf-8") for room in STAGES for path in room.rglob("*.py"))
    used = set(re.findall(r'(?:code"?[=:]|return) ?"([a-z]+_[a-z_]+)"', sources))

    assert re.findall(r"`(\w+)`", listed) == sorted(used - NOT_LOGGED)


def test_listed_test_files_exist():
    assert [name for name in (*LONGEST, *ONE_SPARK) if not (ROOT / "tests" / name).exists()] == []
