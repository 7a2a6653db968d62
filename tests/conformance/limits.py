"""The cases that the runners with staging support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.conformance.observed import Case

#: Seconds that passed in each recorded step, and in addition to each ``elapse_ms``.
STEP, MARGIN = 0.040, 0.060

#: The steps that send messages.
MESSAGES = ("push", "produce", "produce_raw")

#: Acknowledger options of cases, and the queue's actions.  ``reject`` is an option of the cases'
#: acknowledger; here the message stays in the queue, unlike all others.
CONFIGURABLE = {
    "ack": "ack",
    "retry": "retry",
    "dead_letter": "dead_letter",
    "noop": "leave",
    "reject": "leave",
}


def steps_of(case: Case) -> list[tuple[str, Any]]:
    """Returns the kinds and values of a case's steps."""
    return [(kind, value) for step in case["given"]["steps"] for kind, value in step.items()]


def operations(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all operations in a part of a case."""
    if isinstance(value, dict):
        if "op" in value:
            yield value
        for item in value.values():
            yield from operations(item)
    elif isinstance(value, list):
        for item in value:
            yield from operations(item)


def changed_when_settled(value: Any) -> bool:
    """Returns whether a rule changes the data of a message that it acknowledges immediately."""
    if isinstance(value, dict):
        names = {op["op"] for op in value.get("do", [])}
        return ("ack_immediately" in names and bool({"put_data", "add"} & names)) or any(
            map(changed_when_settled, value.values())
        )
    return isinstance(value, list) and any(map(changed_when_settled, value))


def flushes_last(case: Case) -> bool:
    """Returns whether a batch's timeout may pass after the last message of its batcher.

    Staged messages are batched by their arrival times, so the end of input closes such a batch,
    with the trigger ``flush``.
    """
    passed: float | None = None
    for kind, value in steps_of(case):
        if kind in MESSAGES:
            passed = (passed or 0.0) + STEP
        elif kind == "elapse_ms" and passed is not None:
            passed += value / 1000 + MARGIN + STEP
    timeouts = [spec.get("batch_timeout", 1000) for spec in case["given"].get("batchers", [])]
    return any(timeout / 1000 <= (passed or 0.0) for timeout in timeouts)


def not_by_operators(case: Case) -> str:
    """Returns why the operators cannot run a case; empty if they can."""
    if case["given"].get("no_handle_batch"):
        return "refused when the DAG is parsed"
    given, steps = case["given"], steps_of(case)
    producer = given.get("producer") or {}
    kinds = {kind for kind, _ in steps}
    messages = [spec for kind, value in steps if kind in ("push", "produce") for spec in value]
    if "update_rate_limiting" in kinds:
        return "the options of a run are fixed"
    if kinds - {*MESSAGES, "elapse_ms", "reset_rate_limit", "checkpoint", "drain"}:
        return "a step that a run does not have"
    if any(spec.get("acknowledger", "recording") != "recording" for spec in messages):
        return "only the run acknowledges messages of a queue"
    if "push" in kinds and (producer.get("rate_limiting") or producer.get("transformer")):
        return "messages enter a run through its producer only"
    if "produce_raw" in kinds and not producer.get("transformer"):
        return "a queue has nothing but messages"
    if any(kind == "produce_raw" and "kill" in value for kind, value in steps):
        return "an exception of a transformer fails one message"
    if not _configurable(given):
        return "options of an acknowledger of its own"
    return ""


def _configurable(given: dict[str, Any]) -> bool:
    names = list(operations(given))
    if any(op["op"] == "ack_immediately" for op in names):
        return True  # after it no message can be configured
    return all(
        name in ("on_success", "on_failure") and value in CONFIGURABLE
        for op in names
        if op["op"] == "configure_ack"
        for name, value in op["options"].items()
    )


# -- Spark -----------------------------------------------------------------------------------------

#: The areas whose cases run in the Spark application.
SPARK_AREAS = (
    "ack_immediately",
    "acknowledger",
    "batching",
    "drain",
    "end_to_end",
    "handle_batch",
    "handle_failed",
    "partition_by",
)

#: The operations that a ``handle_batch`` with a DataFrame supports.
_OF_ROWS = {"drop", "exit", "fail", "raise", "raise_if_any", "return", "set_status_error"}


def not_by_spark(case: Case) -> str:
    """Returns why the Spark application cannot run a case; empty if it can."""
    inputs = case["given"]
    if case["area"] not in SPARK_AREAS:
        return "of another area"
    skip_reason = not_by_operators(case)
    if skip_reason:
        return skip_reason
    if inputs.get("no_handle_batch"):
        return "the cases share a class, and it has handle_batch"
    if any(op["op"] == "reverse" for op in operations(inputs.get("prepare_messages") or {})):
        return "rows are ordered by receipt"
    ops = list(operations(inputs.get("handle_batch") or {}))
    names = {op["op"] for op in ops}
    if "reverse" in names:
        return "rows are ordered by receipt"
    if "append_copy_of_first" in names:
        return "a row named twice is one message"
    if "ack_immediately" in names or _acks_in_spark(inputs):
        return "the Spark driver cannot acknowledge immediately"
    if names - _OF_ROWS:
        return "rows are not given back, so handle_batch cannot change a message"
    if any(op["op"] == "return" and op["value"] is None for op in ops):
        return "in Spark, None says that all succeeded"
    return ""


def _acks_in_spark(given: dict[str, Any]) -> bool:
    return any(op["op"] == "ack_immediately" for op in operations(given.get("handle_failed") or {}))


def _is_a_list(case: Case) -> bool:
    """Returns whether the chunks of a case are equivalent to batches: one list with one key."""
    pushes = [value for kind, value in steps_of(case) if kind in MESSAGES]
    return len(pushes) == 1 and not any(
        {"batch_key", "batch_mode"} & spec.keys() for spec in pushes[0]
    )


def spark_case(case: Case) -> Case:
    """Returns a case with at least one batcher.

    A case without batchers gets one.  If its ``handle_message`` only fails messages of one list,
    ``handle_batch`` fails them instead, which is equivalent.  Otherwise successful messages go
    through a batch.
    """
    inputs = case["given"]
    if inputs.get("batchers"):
        return case
    options = inputs.get("processor", {})
    most = options.get("max_demand", 10)
    # The size of a chunk, so that handle_failed is called with the same messages.
    size = most - options.get("min_demand", most // 2)
    moved = {**inputs, "batchers": [{"name": "default", "batch_size": size}]}
    rules = inputs.get("handle_message", [])
    if (
        {op["op"] for op in operations(rules)} == {"fail"}
        and "prepare_messages" not in inputs
        and _is_a_list(case)
    ):
        moved |= {"handle_message": [], "handle_batch": {"each": rules}}
    return {**case, "given": moved}
