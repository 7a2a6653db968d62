"""``--cases FILE`` runs another file of cases; without it, those of the areas that are there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.pipelines import needs_throw
from tests.conformance.ways import WAYS

OWN = Path(__file__).with_name("cases.json")

#: The areas that are there; those of a broker come with its producer.
IMPLEMENTED = {
    "ack_immediately",
    "acknowledger",
    "batching",
    "configure_ack",
    "drain",
    "end_to_end",
    "handle_batch",
    "handle_failed",
    "introspection",
    "message_api",
    "options",
    "partition_by",
    "prepare_messages",
    "processor",
    "producer",
    "rate_limiting",
    "telemetry",
    "testing_helpers",
}

_throws = pytest.StashKey[int]()
_others = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", metavar="FILE", help="run all cases of FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_throws] = 0
    config.stash[_others] = Counter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    file = config.getoption("--cases", None)
    cases: list[dict[str, Any]] = json.loads(Path(file or OWN).read_text("utf-8"))["cases"]
    if file is None:
        config.stash[_others] = Counter(
            case["area"] for case in cases if case["area"] not in IMPLEMENTED
        )
        cases = [case for case in cases if case["area"] in IMPLEMENTED]
    config.stash[_throws] = sum(map(needs_throw, cases))
    parameters = []
    for case in cases:
        ways = [way for way in WAYS if case["type"] == "pipeline" and way.applies(case)]
        first = ways[0] if ways else None
        # The first way has the case's own id; the others add their name.
        parameters.append(pytest.param(case, first, id=case["id"]))
        parameters += [
            pytest.param(case, way, id=f"{case['id']}-{way.name}") for way in ways[1:]
        ]
    metafunc.parametrize(("case", "way"), parameters)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    throws, others = config.stash[_throws], config.stash[_others]
    if throws:
        terminalreporter.write_line(f"conformance: {throws} cases skipped that need `throw`")
    if others:
        named = ", ".join(f"{area} ({count})" for area, count in sorted(others.items()))
        terminalreporter.write_line(
            f"conformance: {others.total()} cases of areas not selected: {named}"
        )
