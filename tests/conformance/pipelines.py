"""The pipeline of a case: its options, and callbacks that apply its rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RateLimiting
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.acks import NO_ACK, AckRef, ack_immediately
from airflow_broadway.core.model.message import OK, Status
from airflow_broadway.testing import DummyProducer
from tests.conformance.observed import Case, Observed, freeze, status_of


def needs_throw(value: Any) -> bool:
    """Returns whether a part of a case contains a ``throw``."""
    if isinstance(value, dict):
        return value.get("op") == "throw" or any(map(needs_throw, value.values()))
    return isinstance(value, list) and any(map(needs_throw, value))


# -- rules -----------------------------------------------------------------------------------------


class DroppedMessage:
    """The placeholder that ``drop`` leaves for a message."""


DROP = DroppedMessage()


def _holds(when: dict[str, Any], message: Message) -> bool:
    data = message.data
    number = data if type(data) is int else None
    tests: dict[str, Callable[[Any], bool]] = {
        "always": bool,
        "data": lambda value: bool(data == value),
        "data_in": lambda value: data in value,
        "data_odd": lambda value: number is not None and (number % 2 == 1) == value,
        "data_even": lambda value: number is not None and (number % 2 == 0) == value,
        "data_gte": lambda value: number is not None and number >= value,
        "status": lambda value: message.status.kind == value,
    }
    return all(tests[name](value) for name, value in when.items())


def apply_rules(rules: list[dict[str, Any]], message: Message) -> Any:
    """Applies the first matching rule to a message; returns the result."""
    for rule in rules:
        if _holds(rule["when"], message):
            result: Any = message
            for op in rule["do"]:
                result = _do(op, result)
                if not isinstance(result, Message):
                    return result
            return result
    return message


def _do(op: dict[str, Any], message: Message) -> Any:
    match op["op"]:
        case "fail":
            return message.failed(op["reason"])
        case "raise":
            raise RuntimeError(op["message"])
        case "exit":
            sys.exit(op["reason"])
        case "return":
            return op["value"]
        case "put_data":
            return message.put_data(op["value"])
        case "add":
            return message.update_data(lambda data: data + op["n"])
        case "put_batcher":
            return message.put_batcher(op["value"])
        case "put_batch_key":
            return message.put_batch_key(freeze(op["value"]))
        case "put_batch_key_parity":
            return message.put_batch_key("odd" if message.data % 2 else "even")
        case "put_batch_mode":
            return message.put_batch_mode(op["value"])
        case "configure_ack":
            return message.configure_ack(**op["options"])
        case "ack_immediately":
            return message.ack_immediately()
        case "set_status_ok":
            return message.replace(status=OK)
        case "set_status_error":
            return message.replace(status=Status("error", op.get("reason", "manual")))
        case "drop":
            return DROP
        case other:
            raise ValueError(f"unknown operation {other!r}")


def apply_callback(spec: dict[str, Any], messages: list[Message]) -> Any:
    """Returns a list callback's result by its rules."""
    rules = spec.get("each", [])
    result: list[Any] = [apply_rules(rules, message) for message in messages]
    result = [item for item in result if item is not DROP]
    for op in spec.get("batch", []):
        match op["op"]:
            case "raise":
                raise RuntimeError(op["message"])
            case "raise_if_any":
                if any(message.data == op["data"] for message in messages):
                    raise RuntimeError(op.get("message", "raised"))
            case "exit":
                sys.exit(op["reason"])
            case "return":
                return op["value"]
            case "reverse":
                result.reverse()
            case "append_copy_of_first":
                result.append(result[0])
            case "ack_immediately":
                result = ack_immediately(result)
            case other:
                raise ValueError(f"unknown operation {other!r}")
    return result


# -- options ---------------------------------------------------------------------------------------


def partition_function(spec: dict[str, Any] | None) -> Callable[[Message], int] | None:
    """Returns the function of a case's ``partition_by``."""
    if spec is None:
        return None
    if spec["fn"] == "data":
        return lambda message: int(message.data)
    if spec["fn"] == "bucket_le":
        return lambda message: 0 if message.data <= spec["n"] else 1
    raise ValueError(f"unknown function {spec['fn']!r}")


def _splitter(spec: dict[str, Any]) -> tuple[Any, Callable[[Message, Any], tuple[str, Any]]]:
    if spec["fn"] != "countdown":
        raise ValueError(f"unknown splitter {spec['fn']!r}")

    def split(message: Message, acc: Any) -> tuple[str, Any]:
        left = acc - message.data * spec.get("weight", 1)
        return ("cont", left) if left > 0 else ("emit", spec["reset"])

    return spec["init"], split


#: The defaults of a batcher.
_BATCHER = {"batch_size": 100, "batch_bytes": None, "batch_timeout": 1.0}


def _batcher(spec: dict[str, Any], engine: str) -> Batcher:
    options: dict[str, Any] = {"engine": engine, **_BATCHER}
    for name, value in spec.items():
        if name == "name":
            continue
        if name == "batch_size" and isinstance(value, dict):
            value = _splitter(value)
        elif name == "batch_timeout":
            value = value / 1000
        elif name == "partition_by":
            value = partition_function(value)
        options[name] = value
    return Batcher(**options)


def wrap(event: Message) -> Message:
    """Wraps the data: the only transformer of the cases."""
    if event.data == "kill":
        raise RuntimeError("Error raised")
    return event.put_data(f"{event.data} transformed")


def rate_limiting(spec: dict[str, Any]) -> RateLimiting:
    """Returns the rate limit of a case's producer."""
    return RateLimiting(allowed_messages=spec["allowed_messages"], interval=spec["interval"] / 1000)


def _producer(spec: dict[str, Any]) -> DummyProducer:
    options: dict[str, Any] = {}
    if spec.get("concurrency"):
        options["concurrency"] = spec["concurrency"]
    if spec.get("rate_limiting"):
        options["rate_limiting"] = rate_limiting(spec["rate_limiting"])
    if spec.get("transformer"):
        options["transformer"] = {"wrap": wrap}[spec["transformer"]]
    return DummyProducer(**options)


def class_attributes(case: Case, *, engine: str = "python", prefix: str = "") -> dict[str, Any]:
    """Returns the options of a case as attributes of a pipeline class.

    :param prefix: The prefix of the batchers' names.
    """
    inputs = case["given"]
    processor = dict(inputs.get("processor", {}))
    if "partition_by" in processor:
        processor["partition_by"] = partition_function(processor["partition_by"])
    attributes: dict[str, Any] = {
        "name": inputs.get("name", "Case"),
        "producer": _producer(inputs.get("producer") or {}),
        "processors": Processors(**processor),
        "batchers": {
            prefix + spec["name"]: _batcher(spec, engine) for spec in inputs.get("batchers", [])
        },
    }
    root = partition_function(inputs.get("partition_by"))
    if root is not None:
        attributes["partition_by"] = staticmethod(root)
    if "context" in inputs:
        attributes["context"] = inputs["context"]
    return attributes


# -- the pipeline ----------------------------------------------------------------------------------


class CallbackObserver:
    """Observes the arguments and results of callbacks."""

    def entered(self, messages: list[Message]) -> None:
        return None

    def returned(self, callback: str, given: int, value: Any) -> None:
        return None

    def routed(self, message: Any) -> Any:
        """Returns the message that continues after ``handle_message``."""
        return message


def make_pipeline(case: Case, observed: Observed) -> Broadway:
    """Creates the pipeline of a case; records its callbacks and acks in ``observed``."""
    return make_class(case, observed, class_attributes(case), CallbackObserver())()


def make_class(
    case: Case, observed: Observed, attributes: dict[str, Any], followed: CallbackObserver
) -> type[Broadway]:
    """Creates the pipeline class of a case.

    :param attributes: The options of the class.
    """
    inputs = case["given"]
    sequence = observed.sequence if observed.sequence is not None else []

    def note(entry: list[Any], into: list[Any] | None, value: Any) -> None:
        sequence.append(entry)
        if into is not None:
            into.append(value)

    def called(callback: str, messages: list[Message]) -> Any:
        followed.entered(messages)
        returned = apply_callback(inputs.get(callback) or {}, messages)
        followed.returned(callback, len(messages), returned)
        return returned

    def handle_message(self: Broadway, processor: str, message: Message, context: Any) -> Any:
        note(["handle_message", message.data], observed.handle_message, message.data)
        followed.entered([message])
        returned = followed.routed(apply_rules(inputs.get("handle_message", []), message))
        followed.returned("handle_message", 1, [returned])
        return returned

    def prepare_messages(self: Broadway, messages: list[Message], context: Any) -> Any:
        data = [message.data for message in messages]
        note(["prepare_messages", data], observed.prepare_messages, data)
        return called("prepare_messages", messages)

    def handle_failed(self: Broadway, messages: list[Message], context: Any) -> Any:
        data = [message.data for message in messages]
        note(["handle_failed", data], observed.handle_failed, data)
        if observed.handle_failed_status is not None:
            observed.handle_failed_status.append([status_of(message) for message in messages])
        return called("handle_failed", messages)

    def handle_batch(
        self: Broadway, batcher: str, messages: list[Message], info: BatchInfo, context: Any
    ) -> Any:
        batch = describe_batch_call(batcher, [message.data for message in messages], info)
        note(["handle_batch", batcher, batch["data"]], observed.batches, batch)
        return called("handle_batch", messages)

    attributes["handle_message"] = handle_message
    if "prepare_messages" in inputs:
        attributes["prepare_messages"] = prepare_messages
    if "handle_failed" in inputs:
        attributes["handle_failed"] = handle_failed
    if not inputs.get("no_handle_batch"):
        attributes["handle_batch"] = handle_batch
    pipeline: type[Broadway] = type("Case", (Broadway,), attributes)
    return pipeline


def describe_batch_call(batcher: str, data: list[Any], info: BatchInfo) -> dict[str, Any]:
    """Returns a call of ``handle_batch`` in the cases' format."""
    return {
        "batcher": batcher,
        "batch_key": info.batch_key,
        "partition": info.partition,
        "size": info.size,
        "trigger": info.trigger.value,
        "data": data,
        "batch_id": info.batch_id,
    }


class Recorder:
    """An acknowledger that records its calls in the observations."""

    def __init__(self, observed: Observed) -> None:
        self._seen = observed

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        self._note("ack", self._seen.acks, ack_ref, successful, failed)

    def _note(
        self,
        name: str,
        into: list[Any] | None,
        ack_ref: Any,
        successful: list[Message],
        failed: list[Message],
    ) -> None:
        good, bad = [message.data for message in successful], [message.data for message in failed]
        call = {"ack_ref": ack_ref, "successful": good, "failed": bad}
        if bad and name == "ack":
            call["failed_status"] = [status_of(message) for message in failed]
        if into is not None:
            into.append(call)
        if self._seen.sequence is not None:
            self._seen.sequence.append([name, ack_ref, good, bad])


class ConfigurableRecorder(Recorder):
    """An acknowledger with a ``configure`` function."""

    def configure(self, ack_ref: Any, ack_data: Any, options: dict[str, Any]) -> Any:
        if self._seen.configured is not None:
            self._seen.configured.append({"ack_ref": ack_ref, "options": dict(options)})
        return ack_data


class RaisingRecorder(Recorder):
    """An acknowledger that raises."""

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        self._note("ack_raised", self._seen.ack_calls_that_raised, ack_ref, successful, failed)
        raise PipelineError("ack failed")


class NoAcknowledger:
    """An object that is not an acknowledger."""


def acknowledgers(observed: Observed) -> dict[str, Any]:
    """Returns the acknowledgers of the cases by name."""
    return {
        "recording": ConfigurableRecorder(observed),
        "no_configure": Recorder(observed),
        "raising": RaisingRecorder(observed),
        "missing": NoAcknowledger(),
        "noop": NO_ACK.acknowledger,
    }


def make_message(spec: dict[str, Any], known: dict[str, Any], number: int) -> Message:
    """Creates a message of a case."""
    fields: dict[str, Any] = {
        name: spec[name] for name in ("batcher", "batch_mode", "metadata") if name in spec
    }
    if "batch_key" in spec:
        fields["batch_key"] = freeze(spec["batch_key"])
    acknowledger = known[spec.get("acknowledger", "recording")]
    return Message(
        spec["data"],
        acknowledger=AckRef(acknowledger, freeze(spec.get("ack_ref", "r"))),
        message_id=f"m-{number}",
        position=number,
        **fields,
    )
