"""Checks Broadway's recorded behaviour, case by case.

``python -m pytest tests/conformance`` runs ``cases.json``; ``--cases FILE`` any file like it.
"""

from __future__ import annotations

import pytest

from tests.conformance.observed import differences
from tests.conformance.pipelines import needs_throw
from tests.conformance.units import UNITS


def test_case(case, runner, request, record_property):
    record_property("runner", "unit" if case["type"] == "unit" or runner is None else runner.name)
    if needs_throw(case):
        pytest.skip("needs `throw`, which Python does not have")
    if case["type"] == "unit":
        check = UNITS.get(case["id"])
        if check is None:
            pytest.fail(f"no check for the unit case {case['id']}: {case['title']}")
        check(case)
        return
    if runner is None:
        pytest.fail(f"no runner for the case {case['id']}: {case['title']}")
    result = differences(case, runner.run(case, request))
    if result:
        pytest.fail(
            f"{case['id']} by {runner.name}: {case['title']}\n" + "\n".join(result), pytrace=False
        )
