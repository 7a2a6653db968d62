"""Broadway's own behaviour, case by case.

``python -m pytest tests/conformance`` runs ``cases.json``; ``--cases FILE`` any file like it.
"""

from __future__ import annotations

import pytest

from tests.conformance.observed import differences
from tests.conformance.pipelines import needs_throw
from tests.conformance.units import UNITS


def test_case(case, way, request, record_property):
    record_property("way", "unit" if case["type"] == "unit" or way is None else way.name)
    if needs_throw(case):
        pytest.skip("needs `throw`, which Python has not")
    if case["type"] == "unit":
        check = UNITS.get(case["id"])
        if check is None:
            pytest.fail(f"no check for the unit case {case['id']}: {case['title']}")
        check(case)
        return
    if way is None:
        pytest.fail(f"no way runs the case {case['id']}: {case['title']}")
    result = differences(case, way.run(case, request))
    if result:
        pytest.fail(
            f"{case['id']} by {way.name}: {case['title']}\n" + "\n".join(result), pytrace=False
        )
