"""How much of Broadway's behaviour each way shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.limits import not_by_operators, not_by_spark
from tests.conformance.observed import Case
from tests.conformance.pipelines import needs_throw

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
def test_enough_cases_run(
    why_not: Callable[[Case], str], areas: tuple[str, ...], least: int
) -> None:
    assert count(why_not, *areas) >= least
