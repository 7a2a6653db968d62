"""The ways of running a case.  Another way is another entry of :data:`WAYS`."""

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
class Way:
    """A way of running cases.

    :param why_not: Why this way cannot run a pipeline case; empty if it can.  The first way can
        run all.
    :param run: Runs it, with its fixtures.
    :param marks: Of its tests.
    """

    name: str
    why_not: Callable[[Case], str]
    run: Callable[[Case, pytest.FixtureRequest], Observed]
    marks: Sequence[pytest.MarkDecorator] = ()


class _Codes(logging.Handler):
    """Collects the codes of logged errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.codes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        code = getattr(record, "code", None)
        if code is not None:
            self.codes.append(code)


@contextmanager
def watched(case: Case, seen: Observed) -> Iterator[None]:
    """Collect error codes, and telemetry where the case asks for it or for indices."""
    logger = logging.getLogger("airflow_broadway")
    codes = _Codes()
    logger.addHandler(codes)
    expect = case["expect"]
    handlers = []
    if case["given"].get("capture_telemetry"):
        handlers.append(telemetry.attach(_telemetry_into(seen), events=_SPANS))
    if "handle_message_columns" in expect:
        handlers.append(telemetry.attach(_indices_into(seen), events=["processor.message.start"]))
    if any("batch_processor" in batch for batch in expect.get("batches", [])):
        handlers.append(telemetry.attach(_indices_into(seen), events=["batch_processor.start"]))
    columns: list[Any] = seen.__dict__.setdefault("_processors", [])
    processors: dict[str, int] = seen.__dict__.setdefault("_batch_processors", {})
    try:
        yield
    finally:
        for handler in handlers:
            telemetry.detach(handler)
        logger.removeHandler(codes)
        seen.errors = codes.codes
        if seen.handle_message is not None and "handle_message_columns" in expect:
            seen.handle_message = columns
        for batch in seen.batches or []:
            batch["batch_processor"] = processors.get(batch["batch_id"])


_SPANS = [event for event in telemetry.EVENTS if event not in ("topology.init", "run.stop")]


def _indices_into(seen: Observed) -> telemetry.Handler:
    def handle(event: str, measurements: Any, metadata: Any) -> None:
        if event == "processor.message.start":
            seen.__dict__["_processors"].append([metadata["message"].data, metadata["index"]])
        else:
            batch_id = metadata["batch_info"].batch_id
            seen.__dict__["_batch_processors"][batch_id] = metadata["index"]

    return handle


def _telemetry_into(seen: Observed) -> telemetry.Handler:
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
        if seen.telemetry is not None:
            seen.telemetry.append(entry)

    return handle


# -- by hand ---------------------------------------------------------------------------------------


def run_driven(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case by the test kit's driver, on a clock moved by hand."""
    seen = Observed()
    known = acknowledgers(seen)
    numbers = itertools.count()

    def messages(specs: list[dict[str, Any]]) -> list[Message]:
        return [make_message(spec, known, next(numbers)) for spec in specs]

    with watched(case, seen):
        try:
            pipeline = make_pipeline(case, seen)
        except OptionsError:  # refused at the start: nothing is processed
            return seen
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
                    # Without a transformer the producer itself emits what is no message.
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
                    handled = list(seen.handle_message or [])
                    if seen.checkpoints is not None:
                        seen.checkpoints.append({"checkpoint": value, "handled": handled})
                case "drain":
                    driver.drain(emitted=messages(producer.get("during_drain", [])))
                    for late in messages(producer.get("after_drain", [])):
                        with pytest.raises(PipelineError):
                            driver.produce([late])
                    continue
                case other:
                    raise ValueError(f"the runner knows no step {other!r}")
            driver.elapse(STEP)
    return seen


# -- by run_local ----------------------------------------------------------------------------------


def _not_locally(case: Case) -> str:
    if [kind for kind, _ in steps_of(case)] != ["push", "drain"]:
        return "more than one list of messages"
    return "a producer with options" if case["given"].get("producer") else ""


def run_local(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case by ``run_local``: all that is pushed at once, then drained."""
    seen = Observed()
    known = acknowledgers(seen)
    [push, _] = case["given"]["steps"]
    with watched(case, seen):
        try:
            pipeline = make_pipeline(case, seen)
        except OptionsError:
            return seen
        report = pipeline.run_local(
            [make_message(spec, known, number) for number, spec in enumerate(push["push"])]
        )
    assert report.received == len(push["push"])
    return seen


# -- by the operators ------------------------------------------------------------------------------


def run_operators(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case by the tasks of a run: real operators, queue and staging.

    Not compared: how acknowledgements are grouped and ordered (a run settles in bulk; what became
    of each message is), the order between stages, and the batchers' own telemetry.
    """
    from tests.conformance.staged import StagedCase
    from tests.conformance.tasks import Tasks

    try:
        staged = StagedCase(case, request.getfixturevalue("tmp_path"), Tasks())
    except OptionsError:
        return Observed()
    with watched(case, staged.seen):
        processed = staged.process()
        staged.look()
        staged.batch(processed)
    return staged.acknowledge()


def run_one_task(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Runs a case by ``BroadwayRunOperator``; not compared: what of a queue is not."""
    from tests.conformance.staged import OneTask
    from tests.conformance.tasks import Tasks

    try:
        staged = OneTask(case, request.getfixturevalue("tmp_path"), Tasks())
    except OptionsError:
        return Observed()
    with watched(case, staged.seen):
        return staged.run()


# -- in Spark --------------------------------------------------------------------------------------


def run_spark(case: Case, request: pytest.FixtureRequest) -> Observed:
    """Looks up what a case has seen in the one Spark application that has the batches of all.

    Not compared, beside what the operators cannot tell: telemetry, and which batch processor (one
    thread of several) had a batch.
    """
    application: Application = request.getfixturevalue("application")
    return application.seen(case)


WAYS = [
    Way("driver", lambda case: "", run_driven),
    Way("run_local", _not_locally, run_local),
    Way("operators", not_by_operators, run_operators),
    Way("one_task", not_by_operators, run_one_task),
    Way("spark", not_by_spark, run_spark, [pytest.mark.spark, pytest.mark.timeout(900)]),
]
