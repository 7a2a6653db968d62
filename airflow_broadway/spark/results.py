"""The return values of ``handle_batch`` on Spark.

==============================  ====================================================================
``None``                        every message succeeded
``failed(rows, reason=…)``      these messages failed, all others succeeded; combine with ``|``, or
                                return a list of several
a DataFrame of outcomes         columns ``message_id``, ``ok`` (boolean) or ``status`` (``"ok"`` or
                                ``"failed"``), and optionally ``reason``; a message that is left out
                                has no outcome, and is released
an exception                    every message failed
==============================  ====================================================================

Anything else fails the batch.  For a batcher with a sink, it returns the rows to commit: a
DataFrame, or ``Rows(rows, failed=failed(…))``.

Pipelines import this module while Dags are parsed, so it does not import Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.sink import Rows

#: The words of a ``status`` column.
OK_STATUS = ("ok", "success", "succeeded", "successful")
FAILED_STATUS = ("failed", "failure", "error")


class FailedPart(NamedTuple):
    """Messages that failed for one reason.

    :param rows: A DataFrame with a column ``message_id``, or the ids themselves.
    :param reason: Text, or a Column over ``rows``.
    """

    rows: Any
    reason: Any


class Failed:
    """Failed messages, as returned by :func:`failed`; ``a | b`` is the union."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[FailedPart, ...]) -> None:
        self.parts = parts

    def __or__(self, other: object) -> Failed:
        if not isinstance(other, Failed):
            return NotImplemented
        return Failed(self.parts + other.parts)

    def __repr__(self) -> str:
        return f"Failed({len(self.parts)} parts)"


def failed(rows: Any, reason: Any = "failed by handle_batch") -> Failed:
    """Marks messages of a batch as failed; return the result from ``handle_batch``.

    A DataFrame is read after ``handle_batch`` has returned: a nondeterministic one (``rand()``, a
    changing table) needs ``.cache()`` first.

    :param rows: Rows of ``messages``, or any DataFrame with a column ``message_id``; or an iterable
        of message ids.  Repeated ids count once; an id that is not of the batch fails it whole.
    :param reason: Why: text, or a Column computed from ``rows``, e.g.
        ``F.concat(F.lit("delay "), "data.dep_delay")``.  Cut at 2,048 bytes.
    :raises PipelineError: If ``rows`` or ``reason`` is something else.
    """
    if not (isinstance(reason, str) or is_column(reason)):
        raise PipelineError(f"failed(…, reason=…) takes text or a Column, got: {reason!r}")
    if is_frame(rows):
        if "message_id" not in rows.columns:
            raise PipelineError(
                f"failed() takes rows with a column 'message_id', got columns {rows.columns}"
            )
        return Failed((FailedPart(rows, reason),))
    if is_column(reason):
        raise PipelineError("failed() takes a Column as reason only with a DataFrame of rows")
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise PipelineError(
            f"failed() takes a DataFrame or an iterable of message ids, got: {short(rows)}"
        )
    ids = tuple(rows)
    for message_id in ids:
        if not isinstance(message_id, str):
            raise PipelineError(f"failed() takes message ids as text, got: {short(message_id)}")
    return Failed((FailedPart(ids, reason),))


class Outcomes(NamedTuple):
    """A DataFrame of outcomes, checked.

    :param frame: The DataFrame.
    :param status: The name of the status column: ``"ok"`` or ``"status"``.
    :param reasons: Whether it has a column ``reason``.
    """

    frame: Any
    status: str
    reasons: bool


def read(returned: object) -> Failed | Outcomes | None:
    """Checks the return value of ``handle_batch``.

    :raises PipelineError: If it is not among the values listed above.
    """
    if returned is None or isinstance(returned, Failed):
        return returned
    if isinstance(returned, (list, tuple)) and all(isinstance(item, Failed) for item in returned):
        return Failed(tuple(part for item in returned for part in item.parts))
    if is_frame(returned):
        return _check_outcomes(returned)
    kind = "element" if isinstance(returned, (list, tuple)) else "return"
    raise PipelineError(
        f"handle_batch returned {short(returned)}; on Spark it returns None when all messages"
        " succeeded, failed(rows, reason=…), a list of those, or a DataFrame of outcomes",
        code=f"handle_batch_bad_{kind}",
    )


def read_rows(returned: object) -> tuple[Any, Failed | None]:
    """Checks the return value of ``handle_batch`` of a batcher with a sink.

    :returns: The rows, and the failed messages.
    :raises PipelineError: If it is neither a DataFrame nor :class:`Rows`.
    """
    result = returned if isinstance(returned, Rows) else Rows(returned)
    if not is_frame(result.rows):
        raise PipelineError(
            f"handle_batch returned {short(returned)}; with a sink it returns the rows to commit, a"
            " DataFrame, or Rows(rows, failed=failed(…))",
            code="handle_batch_bad_return",
        )
    marked = read(result.failed or None)
    if isinstance(marked, Outcomes):
        raise PipelineError(
            "Rows(…, failed=…) takes failed(rows, reason=…), or a list of those",
            code="handle_batch_bad_element",
        )
    return result.rows, marked


def _check_outcomes(frame: Any) -> Outcomes:
    columns = list(frame.columns)
    statuses = [name for name in ("ok", "status") if name in columns]
    fault = ""
    if "message_id" not in columns:
        fault = "without the column message_id"
    elif len(statuses) != 1:
        fault = f"with {'both' if statuses else 'neither'} of the columns ok and status"
    if fault:
        # Reports truncate reasons: the error and the way out come first, the columns last.
        raise PipelineError(
            f"handle_batch returned a DataFrame {fault}; return None if all succeeded,"
            " failed(rows, reason=…), or message_id, ok and reason; its columns:"
            f" {', '.join(map(str, columns))}",
            code="handle_batch_bad_return",
        )
    kind = frame.schema[statuses[0]].dataType.typeName()
    wanted = ("boolean",) if statuses[0] == "ok" else ("boolean", "string")
    if kind not in wanted:
        raise PipelineError(
            f"the column {statuses[0]!r} of the DataFrame that handle_batch returned is"
            f" {kind}, expected {' or '.join(wanted)}",
            code="handle_batch_bad_return",
        )
    return Outcomes(frame, statuses[0], "reason" in columns)


def is_frame(value: object) -> bool:
    """Returns whether a value is a Spark DataFrame, classic or of Spark Connect."""
    return _is_of_spark(value, "DataFrame")


def is_column(value: object) -> bool:
    """Returns whether a value is a Spark Column, classic or of Spark Connect."""
    return _is_of_spark(value, "Column")


def _is_of_spark(value: object, name: str) -> bool:
    # By name: this module must not import Spark, and Connect's classes share no base in Spark 3.5.
    return any(
        base.__name__ == name and base.__module__.startswith("pyspark.sql.")
        for base in type(value).__mro__
    )


def short(value: object) -> str:
    """Formats a value for an error: its type, and its truncated text."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
