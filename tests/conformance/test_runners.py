"""The number of cases that each runner supports."""

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
from tests.conformance.runners import RUNNERS

CASES: list[Case] = json.loads(Path(__file__).with_name("cases.json").read_text("utf-8"))["cases"]


def count(skip_reason: Callable[[Case], str], *areas: str) -> int:
    return sum(
        case["type"] == "pipeline"
        and (not areas or case["area"] in areas)
        and not needs_throw(case)
        and not skip_reason(case)
        for case in CASES
    )


@pytest.mark.parametrize(
    ("skip_reason", "areas", "least"),
    [
        (not_by_operators, (), 90),
        (not_by_spark, ("handle_batch", "handle_failed", "acknowledger", "batching"), 40),
    ],
)
def test_every_runner_runs_enough_cases(skip_reason, areas, least):
    assert count(skip_reason, *areas) >= least


PAGE = Path(__file__).parents[1] / "README.md"


def table() -> str:
    """Formats the numbers of skipped cases by reason and runner."""
    runners = [runner for runner in RUNNERS if runner.name != "driver"]
    counts_by_reason: dict[str, Counter[str]] = {}
    for case in CASES:
        if case["type"] == "pipeline" and case["area"] in IMPLEMENTED and not needs_throw(case):
            for runner in runners:
                skip_reason = runner.skip_reason(case)
                if skip_reason and skip_reason != "of another area":
                    counts_by_reason.setdefault(skip_reason, Counter())[runner.name] += 1
    lines = [f"| difference | {' | '.join(f'`{runner.name}`' for runner in runners)} |"]
    lines.append("|---" * (len(runners) + 1) + "|")
    for skip_reason, counts in sorted(counts_by_reason.items()):
        cells = [str(counts[runner.name] or "") for runner in runners]
        lines.append(f"| {skip_reason} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_lists_skipped_cases():
    assert table() in PAGE.read_text("utf-8"), "in tests/README.md put:\n" + table()
