"""``--cases FILE`` runs another file of cases; without it, those of the areas that are there."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.pipelines import needs_throw
from tests.conformance.ways import WAYS, Way

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
    "kafka",
    "message_api",
    "options",
    "partition_by",
    "prepare_messages",
    "processor",
    "producer",
    "pubsub",
    "rabbitmq",
    "rate_limiting",
    "sqs",
    "telemetry",
    "testing_helpers",
}

#: Airflow makes files in its home when it is imported: not in the developer's own.
HOME = Path(__file__).resolve().parents[2] / "build" / "airflow-test"

_throws = pytest.StashKey[int]()
_others = pytest.StashKey[Counter[str]]()
#: Way → why not → ids of the cases.
_left_out = pytest.StashKey[dict[str, dict[str, list[str]]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", metavar="FILE", help="run all cases of FILE")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("AIRFLOW_HOME", str(HOME))
    config.stash[_throws] = 0
    config.stash[_others] = Counter()
    config.stash[_left_out] = {}


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
    left_out: dict[str, dict[str, list[str]]] = {way.name: {} for way in WAYS}
    config.stash[_left_out] = left_out
    parameters = []
    for case in cases:
        # The first way has the case's own id; the others add their name.
        first = WAYS[0] if case["type"] == "pipeline" else None
        parameters.append(pytest.param(case, first, id=case["id"]))
        if first is None or needs_throw(case):
            continue
        for way in WAYS[1:]:
            why_not = _why_not(way, case)
            if why_not:
                left_out[way.name].setdefault(why_not, []).append(case["id"])
            else:
                name = f"{case['id']}-{way.name}"
                parameters.append(pytest.param(case, way, id=name, marks=way.marks))
    metafunc.parametrize(("case", "way"), parameters)


def _names() -> list[str]:
    return [way.name for way in WAYS]


def _why_not(way: Way, case: dict[str, Any]) -> str:
    try:
        return way.why_not(case)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # The first way runs it, and fails.
        return f"it cannot be read: {type(error).__name__}: {error}"


@pytest.fixture(scope="session")
def application(request, tmp_path_factory):
    """The Spark application of the selected cases."""
    from tests.conformance.application import Application
    from tests.unit.spark.session import spark_session

    selected = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [
        callspec.params["case"]
        for callspec in selected
        if callspec is not None
        and isinstance(callspec.params.get("way"), Way)
        and callspec.params["way"].name == "spark"
    ]
    return Application(cases, tmp_path_factory.mktemp("application"), spark_session())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    throws, others = config.stash[_throws], config.stash[_others]
    ran = Counter(
        str(dict(report.user_properties)["way"])
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and "way" in dict(report.user_properties)
    )
    if ran:
        counts = ", ".join(f"{ran[name]} by {name}" for name in ("unit", *_names()) if ran[name])
        terminalreporter.write_line(f"conformance: cases run: {counts}")
    for way, reasons in config.stash[_left_out].items():
        if ran[way]:
            for why_not, ids in reasons.items():
                terminalreporter.write_line(
                    f"conformance: {len(ids)} cases not by {way}: {why_not}: {' '.join(ids)}"
                )
    if throws:
        terminalreporter.write_line(f"conformance: {throws} cases skipped that need `throw`")
    if others:
        named = ", ".join(f"{area} ({count})" for area, count in sorted(others.items()))
        terminalreporter.write_line(
            f"conformance: {others.total()} cases of areas not selected: {named}"
        )
