"""Those of RabbitMQ's cases that are there; its area is selected once all eight are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.observed import Case
from tests.conformance.units_rabbitmq import RABBITMQ

CASES: list[Case] = [
    each
    for each in json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]
    if each["id"] in RABBITMQ
]


@pytest.mark.parametrize("rabbit_case", CASES, ids=[each["id"] for each in CASES])
def test_rabbitmq_case(rabbit_case: Case) -> None:
    RABBITMQ[rabbit_case["id"]](rabbit_case)
