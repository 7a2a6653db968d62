"""The runners of cases; add an entry to :data:`RUNNERS` for another one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from airflow_broadway import Message
from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.testing import PipelineDriver
from tests.conformance.limits import MARGIN, STEP, not_by_operators, not_by_spark, steps_of
from tests.conformance.observed import Case, Observed
from tests.conformance.pipelines import acknowledgers, make_message, make_pipeline

if TYPE_CHECKING:
    from tests.conformance.application import Application


@dataclass(frozen=True)
class Runner:
    """A runner of cases.

    :param skip_reason: Returns why the runner does not support a pipeline case; empty if it does.
        The first runner supports all.
    :param run: Runs a case with the test's fixtures.
    :param marks: The pytest marks of the tests.
    """

    name: str
    skip_reason: Callable[[Case], str]
    run: Callable[[Case, pytest.FixtureRequest], Observed]
    marks: Sequence[pytest.MarkDecorator] = ()


class _ErrorCodes(logging.Handler):
    """Collects the codes of logged errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.codes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        code = getattr(record, "code", None)
        if code is not None:
            self.codes.append(code)


@contextmanager
def record_telemetry(case: Case, observed: Observed) -> Iterator[None]:
    """Records error codes, and the telemetry that the case expects."""
    logger = logging.getLogger("airflow_broadway")
    codes = _ErrorCodes()
    logger.addHandler(codes)
    expect = case["expect"]
    handlers = []
    if case["given"].get("capture_telemetry"):
        handlers.append(telemetry.attach(_telemetry_into(observed), events=_SPANS))
    if "handle_message_columns" in expect:
        handlers.append(
            telemetry.attach(_indices_into(observed), events=["processor.message.start"])
        )
    if any("batch_processor" in batch for batch in expect.get("batches", [])):
        handlers.append(telemetry.attach(_indices_into(observed), events=["batch_processor.start"]))
    columns: list[Any] = observed.__dict__.setdefault("_processors", [])
    processors: dict[str, int] = observed.__dict__.setdefault("_batch_processors", {})
    try:
        yield
    finally:
        for handler in handlers:
            telemetry.detach(handler)
        logger.removeHandler(codes)
        observed.errors = codes.codes
        if observed.handle_message is not None and "handle_message_columns" in expect:
            observed.handle_message = columns
        for batch in observed.batches or []:
            batch["batch_processor"] = processors.get(batch["batch_id"])


_SPANS = [event for event in telemetry.EVENTS if event not in ("topology.init", "run.stop")]


def _indices_into(observed: Observed) -> telemetry.Handler:
    def handle(event: str, measurements: Any, metadata: Any) -> None:
        if event == "processor.message.start":
            observed.__dict__["_processors"].append([metadata["message"].data, metadata["index"]])
        else:
            batch_id = metadata["batch_info"].batch_id
            observed.__dict__["_batch_processors"][batch_id] = metadata["index"]

    return handle


def _telemetry_into(observed: Observed) -> telemetry.Handler:
    def handle(event: str, measurements: Any, metadata: Any) -> None:
        entry: dict[str, Any] = {
            "event": event,
            "measurements": sorted(measurements),
            "metadata_keys": sorted(metadata),
        }
        for name, value in metadata.items():
            if name == "message":
                entry[name] = value.data
            elif isinstance(value, list):
                entry[name] = [item.data for item in value if isinstance(item, Message)]
            elif name == "batch_info":
                entry["trigger"] = value.trigger.value
        if observed.telemetry is not None:
            observed.telemetry.append(entry)

    return handle


# -- the test kit's driver -------------------------------------------------------------------------


def run_driven(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case with the test kit's driver and a manual clock."""
    observed = Observed()
    known = acknowledgers(observed)
    numbers = itertools.count()

    def messages(specs: list[dict[str, Any]]) -> list[Message]:
        return [make_message(spec, known, next(numbers)) for spec in specs]

    with record_telemetry(case, observed):
        try:
            pipeline = make_pipeline(case, observed)
        except OptionsError:  # invalid options: nothing is processed
            return observed
        driver = PipelineDriver(pipeline)
        producer = case["given"].get("producer") or {}
        for step in case["given"]["steps"]:
            ((kind, value),) = step.items()
            match kind:
                case "push":
                    driver.push(messages(value))
                case "produce":
                    driver.produce(messages(value))
                case "produce_raw":
                    raw = [{"data": event, "ack_ref": "r"} for event in value]
                    # Without a transformer, the producer emits values that are no messages.
                    driver.produce(messages(raw) if producer.get("transformer") else value)
                case "elapse_ms":
                    driver.elapse(value / 1000 + MARGIN)
                case "reset_rate_limit":
                    driver.reset_rate_limit()
                case "update_rate_limiting":
                    options = dict(value)
                    if "interval" in options:
                        options["interval"] /= 1000
                    driver.update_rate_limiting(**options)
                case "checkpoint":
                    handled = list(observed.handle_message or [])
                    if observed.checkpoints is not None:
                        observed.checkpoints.append({"checkpoint": value, "handled": handled})
                case "drain":
                    driver.drain(emitted=messages(producer.get("during_drain", [])))
                    for late in messages(producer.get("after_drain", [])):
                        with pytest.raises(PipelineError):
                            driver.produce([late])
                    continue
                case other:
                    raise ValueError(f"unknown step {other!r}")
            driver.elapse(STEP)
    return observed


# -- run_local -------------------------------------------------------------------------------------


def _not_locally(case: Case) -> str:
    if [kind for kind, _ in steps_of(case)] != ["push", "drain"]:
        return "more than one list of messages"
    if case["given"].get("no_handle_batch"):
        return "refused before it begins"
    return "a producer with options" if case["given"].get("producer") else ""


def run_local(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case with ``run_local``: sends all messages, then drains."""
    observed = Observed()
    known = acknowledgers(observed)
    [push, _] = case["given"]["steps"]
    with record_telemetry(case, observed):
        try:
            pipeline = make_pipeline(case, observed)
        except OptionsError:
            return observed
        report = pipeline.run_local(
            [make_message(spec, known, number) for number, spec in enumerate(push["push"])]
        )
    assert report.received == len(push["push"])
    return observed


# -- the operators ---------------------------------------------------------------------------------


def run_operators(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case as the tasks of a run: real operators, queue and staging.

    Compares the final state of each message, but neither the grouping and order of acknowledgements
    (a run settles in bulk), nor the order between stages, nor the batchers' telemetry.
    """
    from tests.conformance.staged import StagedCase
    from tests.conformance.tasks import Tasks

    try:
        staged = StagedCase(case, request.getfixturevalue("tmp_path"), Tasks())
    except OptionsError:
        return Observed()
    with record_telemetry(case, staged.observed):
        processed = staged.process()
        staged.look()
        staged.batch(processed)
    return staged.acknowledge()


def run_one_task(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case with ``BroadwayRunOperator``; compares like :func:`run_operators`."""
    from tests.conformance.staged import OneTask
    from tests.conformance.tasks import Tasks

    try:
        staged = OneTask(case, request.getfixturevalue("tmp_path"), Tasks())
    except OptionsError:
        return Observed()
    with record_telemetry(case, staged.observed):
        return staged.run()


# -- Spark -----------------------------------------------------------------------------------------


def run_spark(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Returns the observations of a case from the Spark application that runs all cases.

    Compares neither the fields that :func:`run_operators` ignores, nor telemetry, nor the batch
    processor (thread) of a batch.
    """

    application: Application = request.getfixturevalue("application")
    return application.observed(case)


RUNNERS = [
    Runner("driver", lambda case: "", run_driven),
    Runner("run_local", _not_locally, run_local),
    Runner("operators", not_by_operators, run_operators),
    Runner("one_task", not_by_operators, run_one_task),
    Runner("spark", not_by_spark, run_spark, [pytest.mark.spark, pytest.mark.timeout(900)]),
]
