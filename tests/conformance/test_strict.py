"""The comparison is strict: every changed expectation fails."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.observed import Case, Observed, alternative_of, differences
from tests.conformance.pipelines import needs_throw
from tests.conformance.runners import run_driven

CASES: list[Case] = [
    case
    for case in json.loads(Path(__file__).with_name("cases.json").read_text("utf-8"))["cases"]
    if case["type"] == "pipeline" and case["area"] not in ("kafka", "pubsub")
    if not needs_throw(case)
]

#: Fields that are not compared, or that list forbidden values, where fewer values always pass.
NOTES = {"handle_message_columns", "never_acked", "why"}


def corruptions(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path of each part of ``value``, and ``value`` with that part changed."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name not in NOTES:
                for where, changed in corruptions(part):
                    yield f"{name}.{where}", {**value, name: changed}
    elif isinstance(value, list):
        for index, part in enumerate(value):
            for where, changed in corruptions(part):
                yield f"{index}.{where}", [*value[:index], changed, *value[index + 1 :]]
        if value:
            yield "shorter", value[:-1]
        yield "longer", [*value, *(value[-1:] or ["?"])]
    elif isinstance(value, str):
        yield "text", value + "?"
    elif isinstance(value, bool):
        yield "bool", not value
    elif isinstance(value, int):
        yield "number", value + 100
    elif value is None:
        yield "null", "?"


def is_met(case: Case, observed: Observed) -> bool:
    try:
        return not differences(case, observed)
    except (IndexError, KeyError, TypeError, ValueError):  # an invalid case fails
        return False


@pytest.mark.parametrize("recorded", CASES, ids=lambda case: case["id"])
def test_changed_expectations_fail(recorded, request):
    observed = run_driven(recorded, request)
    assert differences(recorded, observed) == []
    # Change the alternative if that is what is observed.
    expected = recorded["expect"]
    alone = {name: value for name, value in recorded.items() if name != "accept"}
    if differences(alone, observed):
        expected = alternative_of(recorded)
    met = [
        where
        for where, expect in corruptions(expected)
        if is_met({**alone, "expect": expect}, copy.deepcopy(observed))
    ]
    assert met == []


def test_forbidden_acknowledgements_are_detected(request):
    [case] = [case for case in CASES if case["id"] == "hf-010"]
    observed = run_driven(case, request)
    for acked in (1, 3):
        changed = {**case, "expect": {**case["expect"], "never_acked": [acked]}}
        assert differences(changed, observed) == [
            f"never_acked: acknowledged nevertheless: [{acked}]"
        ]
