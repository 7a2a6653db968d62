"""How much of Broadway's behaviour each way shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.conftest import IMPLEMENTED
from tests.conformance.limits import not_by_operators, not_by_spark
from tests.conformance.observed import Case
from tests.conformance.pipelines import needs_throw
from tests.conformance.ways import WAYS

CASES: list[Case] = json.loads(Path(__file__).with_name("cases.json").read_text("utf-8"))["cases"]


def count(why_not: Callable[[Case], str], *areas: str) -> int:
    return sum(
        case["type"] == "pipeline"
        and (not areas or case["area"] in areas)
        and not needs_throw(case)
        and not why_not(case)
        for case in CASES
    )


@pytest.mark.parametrize(
    ("why_not", "areas", "least"),
    [
        (not_by_operators, (), 90),
        (not_by_spark, ("handle_batch", "handle_failed", "acknowledger", "batching"), 40),
    ],
)
def test_every_way_runs_enough_cases(why_not, areas, least):
    assert count(why_not, *areas) >= least


PAGE = Path(__file__).parents[1] / "README.md"


def table() -> str:
    """Formats the numbers of cases that each way leaves out, by reason."""
    ways = [way for way in WAYS if way.name != "driver"]
    found: dict[str, Counter[str]] = {}
    for case in CASES:
        if case["type"] == "pipeline" and case["area"] in IMPLEMENTED and not needs_throw(case):
            for way in ways:
                why_not = way.why_not(case)
                if why_not and why_not != "of another area":
                    found.setdefault(why_not, Counter())[way.name] += 1
    lines = [f"| difference | {' | '.join(f'`{way.name}`' for way in ways)} |"]
    lines.append("|---" * (len(ways) + 1) + "|")
    for why_not, counts in sorted(found.items()):
        cells = [str(counts[way.name] or "") for way in ways]
        lines.append(f"| {why_not} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_lists_skipped_cases():
    assert table() in PAGE.read_text("utf-8"), "in tests/README.md put:\n" + table()
