"""The cases of type ``unit``: calls of the public API, compared with the case's expectation.

Error texts differ from Broadway's: an error is the expected one if it names the option of the case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors, RateLimiting
from airflow_broadway.core.errors import BroadwayError, OptionsError, PipelineError
from airflow_broadway.core.model.acks import ack_immediately
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.testing import DummyProducer, PipelineDriver, test_batch, test_message
from tests.conformance.observed import Case
from tests.conformance.units_kafka import KAFKA
from tests.conformance.units_pubsub import PUBSUB
from tests.conformance.units_rabbitmq import RABBITMQ
from tests.conformance.units_sqs import SQS


class Minimal(Broadway):
    """The base class of the pipelines of unit cases."""

    producer = DummyProducer()

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


def _pipeline(**attributes: Any) -> Broadway:
    pipeline: type[Broadway] = type("P", (Minimal,), attributes)
    return pipeline()


def rate_limiting_api(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    limiter = RateLimiter(None)
    for call, expected in zip(given["without_rate_limiting"], expect["without"], strict=True):
        with pytest.raises(BroadwayError) as raised:
            _limiter_call(limiter, call)
        if isinstance(expected, list):
            assert isinstance(raised.value, PipelineError)
            assert raised.value.code == expected[1]
        else:
            [option] = re.findall(r"\[?:(\w+)\]? option|options \[:(\w+)\]", expected)[:1]
            assert isinstance(raised.value, OptionsError)
            assert raised.value.path == f"rate_limiting.{''.join(option)}"
    options = given["with"]
    limiter = RateLimiter(
        RateLimiting(
            allowed_messages=options["allowed_messages"], interval=options["interval"] / 1000
        )
    )
    actual = limiter.get_rate_limiting()
    assert {**actual, "interval": actual["interval"] * 1000} == expect["get"]


def _limiter_call(limiter: RateLimiter, call: str) -> None:
    if call == "get":
        limiter.get_rate_limiting()
        return
    [(name, value)] = re.findall(r"update\((\w+)=(\d+)\)", call)
    limiter.update_rate_limiting(**{name: int(value)})


def _unchecked(function: Callable[..., object], *arguments: object, **options: object) -> object:
    """Calls a function with arguments that a type checker would reject."""
    return function(*arguments, **options)


def _two(first: Any, second: Any) -> Any:
    return first, second


#: The equivalent of each variant of the case, and the option that the error names.
CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "name = 1": (lambda: Minimal(name=1), "name"),
    "remove name": (lambda: Minimal(name=""), "name"),
    "remove producer": (lambda: _pipeline(producer=None), "producer"),
    "remove processors": (lambda: _pipeline(processors=None), "processors"),
    "processors = {}": (lambda: _pipeline(processors={}), "processors"),
    "processors.default.concurrency = 0": (
        lambda: Minimal(processors={"concurrency": 0}),
        "processors.concurrency",
    ),
    "batchers.sqs.batch_sizy = 10": (
        lambda: _pipeline(batchers={"sqs": _unchecked(Batcher, batch_sizy=10)}),
        "batch_sizy",
    ),
    "batchers.default.batch_size = 0": (
        lambda: _pipeline(batchers={"default": Batcher(batch_size=0)}),
        "batch_size",
    ),
    "batchers.sqs.batch_size = {init: 0, fn: arity 1}": (
        lambda: Batcher(batch_size=(0, lambda message: message), max_demand=10),
        "batch_size",
    ),
    "batchers.sqs.batch_size = bare function": (lambda: Batcher(batch_size=_two), "batch_size"),
    "batchers.sqs.batch_size = {init: 10, fn: arity 2} without max_demand": (
        lambda: Batcher(batch_size=(10, _two)),
        "max_demand",
    ),
    "batchers.default.batch_timeout = 0": (
        lambda: Batcher(engine="python", batch_timeout=0),
        "batch_timeout",
    ),
    "batchers.default.batch_timeout = infinity": (
        lambda: Batcher(engine="python", batch_timeout=float("inf")),
        "batch_timeout",
    ),
    "producer.rate_limiting = {interval: 5}": (
        lambda: Minimal(producer={"rate_limiting": {"interval": 5}}),
        "allowed_messages",
    ),
    "partition_by = function of arity 2": (
        lambda: _pipeline(partition_by=staticmethod(_two)),
        "partition_by",
    ),
    "foo = 1 at top level": (lambda: Minimal(foo=1), "foo"),
    "shutdown = infinity": (lambda: Minimal(shutdown=float("inf")), "shutdown"),
    "producer.module is not a {module, arg} pair": (
        lambda: _pipeline(producer="dummy"),
        "producer",
    ),
}


def configuration_errors(case: Case) -> None:
    for variant in case["given"]["variants"]:
        change, option = CHANGES[variant["change"]]
        with pytest.raises(OptionsError) as raised:
            change()
        assert option in str(raised.value), variant


def defaults(case: Case) -> None:
    pipeline = _pipeline(batchers={"default": Batcher(engine="python")})
    batcher, processors = pipeline.batchers["default"], pipeline.processors
    import os

    actual_defaults = {
        "shutdown": pipeline.shutdown * 1000,
        "context": pipeline.context,
        "batchers": list(Minimal().batchers),
        "producer.concurrency": pipeline.producer.concurrency,
        "producer.transformer": pipeline.producer.transformer,
        "producer.rate_limiting": pipeline.producer.rate_limiting,
        "processors.*.concurrency": processors.concurrency,
        "processors.*.max_demand": processors.max_demand,
        "processors.*.min_demand": processors.min_demand,
        "batchers.*.concurrency": batcher.concurrency,
        "batchers.*.batch_size": batcher.batch_size,
        "batchers.*.batch_timeout": (batcher.batch_timeout or 0) * 1000,
        "batchers.*.max_demand": batcher.max_demand,
    }
    meant = {
        "2 * online schedulers": 2 * (os.cpu_count() or 1),
        "batch_size": batcher.batch_size,
        "max_demand // 2": processors.max_demand // 2,
    }
    # A run is finite, so it has no supervisor options.
    without = {
        "batchers.*.min_demand",
        "hibernate_after",
        "max_restarts",
        "max_seconds",
        "resubscribe_interval",
    }
    for name, value in case["expect"]["defaults"].items():
        if name not in without:
            expected = meant.get(value, value) if isinstance(value, str) else value
            assert actual_defaults[name] == expected, name


def one_set_of_processors(case: Case) -> None:
    processors = {name: Processors() for name in case["given"]["processors"]}
    with pytest.raises(OptionsError, match="exactly one set of processors"):
        _pipeline(processors=processors)


def root_partition_by(case: Case) -> None:
    functions: dict[str, Callable[[Any], int]] = {"f_root": lambda _: 0, "f_b": lambda _: 1}
    given, expect = case["given"], case["expect"]
    batchers = {
        name: Batcher(partition_by=functions.get(spec.get("partition_by", "")))
        for name, spec in given["batchers"].items()
    }
    pipeline = _pipeline(
        partition_by=staticmethod(functions[given["partition_by"]]), batchers=batchers
    )
    assert pipeline.processors.partition_by is functions[expect["processors.default.partition_by"]]
    for name, batcher in pipeline.batchers.items():
        assert batcher.partition_by is functions[expect[f"batchers.{name}.partition_by"]]


def prepare_for_start(case: Case) -> None:
    returns: list[Any] = [
        # Broadway: options without a name; here an invalid name.
        {"name": ""} if isinstance(value, list) else value
        for value in case["given"]["returns"]
    ]
    for value in returns:

        class Producer(DummyProducer):
            def prepare_for_start(self, pipeline: Broadway) -> Any:
                return value  # noqa: B023 - called at once

        with pytest.raises(BroadwayError, match=r"prepare_for_start|'name'"):
            _pipeline(producer=Producer())


def helper_options(case: Case) -> None:
    calls: dict[str, Callable[[], object]] = {
        "test_message(batch_mode=flush)": lambda: _unchecked(
            test_message, Minimal, 1, batch_mode="flush"
        ),
        "test_batch(foo=1)": lambda: _unchecked(test_batch, Minimal, [1], foo=1),
        "test_batch(batch_mode=x)": lambda: test_batch(Minimal, [1], batch_mode="x"),
    }
    for call in case["given"]["calls"]:
        with pytest.raises((TypeError, ValueError)):
            calls[call]()


def dummy_producer(case: Case) -> None:
    assert Minimal().run_local().received == 0
    driver = PipelineDriver(Minimal)
    tested = test_batch(driver, case["given"]["push"])
    actual = [
        {
            "successful": [message.data for message in call.successful],
            "failed": [message.data for message in call.failed],
        }
        for call in tested.calls
    ]
    assert actual == case["expect"]["acks"]


def topology(case: Case) -> None:
    inputs = case["given"]
    [(key, options)] = inputs["processors"].items()
    pipeline = _pipeline(
        name=inputs["name"],
        processors={key: Processors(**options)},
        batchers={name: Batcher(**spec) for name, spec in inputs["batchers"].items()},
    )
    assert pipeline.topology() == case["expect"]["topology"]
    assert pipeline.producer_names() == case["expect"]["producer_names"]


def message_guards(case: Case) -> None:
    message = Message(1)
    calls: dict[str, Callable[[], object]] = {
        "put_batcher(m, non-atom)": lambda: message.put_batcher(1),  # type: ignore[arg-type]
        "put_batch_mode(m, 'x')": lambda: message.put_batch_mode("x"),
        "ack_immediately([])": lambda: ack_immediately([]),
    }
    for call in case["given"]["calls"]:
        with pytest.raises((TypeError, ValueError)):
            calls[call]()


UNITS: dict[str, Callable[[Case], None]] = {
    "rlapi-001": rate_limiting_api,
    "opt-001": configuration_errors,
    "opt-002": defaults,
    "opt-003": one_set_of_processors,
    "opt-005": root_partition_by,
    "opt-006": prepare_for_start,
    "help-002": helper_options,
    "help-003": dummy_producer,
    "intro-001": topology,
    "msg-001": message_guards,
    **RABBITMQ,
    **SQS,
    **KAFKA,
    **PUBSUB,
}
