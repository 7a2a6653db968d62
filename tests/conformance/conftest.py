"""``--cases FILE`` selects another file of cases; by default runs the supported areas."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.pipelines import needs_throw
from tests.conformance.runners import RUNNERS, Runner

OWN = Path(__file__).with_name("cases.json")

#: The supported areas; those of a broker need its producer.
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

#: Airflow creates files in its home when it is imported.
HOME = Path(__file__).resolve().parents[2] / "build" / "airflow-test"

_throws = pytest.StashKey[int]()
_others = pytest.StashKey[Counter[str]]()
#: Ids of skipped cases by runner and reason.
_skipped_cases = pytest.StashKey[dict[str, dict[str, list[str]]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", metavar="FILE", help="run all cases of FILE")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("AIRFLOW_HOME", str(HOME))
    config.stash[_throws] = 0
    config.stash[_others] = Counter()
    config.stash[_skipped_cases] = {}


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
    skipped: dict[str, dict[str, list[str]]] = {runner.name: {} for runner in RUNNERS}
    config.stash[_skipped_cases] = skipped
    parameters = []
    for case in cases:
        # The first runner's test id is the case's id; the others append their names.
        first = RUNNERS[0] if case["type"] == "pipeline" else None
        parameters.append(pytest.param(case, first, id=case["id"]))
        if first is None or needs_throw(case):
            continue
        for runner in RUNNERS[1:]:
            skip_reason = _skip_reason(runner, case)
            if skip_reason:
                skipped[runner.name].setdefault(skip_reason, []).append(case["id"])
            else:
                name = f"{case['id']}-{runner.name}"
                parameters.append(pytest.param(case, runner, id=name, marks=runner.marks))
    metafunc.parametrize(("case", "runner"), parameters)


def _names() -> list[str]:
    return [runner.name for runner in RUNNERS]


def _skip_reason(runner: Runner, case: dict[str, Any]) -> str:
    try:
        return runner.skip_reason(case)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # The first runner runs it, and fails.
        return f"invalid: {type(error).__name__}: {error}"


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
        and isinstance(callspec.params.get("runner"), Runner)
        and callspec.params["runner"].name == "spark"
    ]
    return Application(cases, tmp_path_factory.mktemp("application"), spark_session())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    throws, others = config.stash[_throws], config.stash[_others]
    counts_by_runner = Counter(
        str(dict(report.user_properties)["runner"])
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and "runner" in dict(report.user_properties)
    )
    if counts_by_runner:
        counts = ", ".join(
            f"{counts_by_runner[name]} by {name}"
            for name in ("unit", *_names())
            if counts_by_runner[name]
        )
        terminalreporter.write_line(f"conformance: cases run: {counts}")
    for runner, reasons in config.stash[_skipped_cases].items():
        if counts_by_runner[runner]:
            for skip_reason, ids in reasons.items():
                terminalreporter.write_line(
                    f"conformance: {len(ids)} cases not by {runner}: {skip_reason}: {' '.join(ids)}"
                )
    if throws:
        terminalreporter.write_line(f"conformance: {throws} cases skipped that need `throw`")
    if others:
        named = ", ".join(f"{area} ({count})" for area, count in sorted(others.items()))
        terminalreporter.write_line(
            f"conformance: {others.total()} cases of areas not selected: {named}"
        )
