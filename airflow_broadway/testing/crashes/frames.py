"""Reads the arguments and results of ``handle_batch`` on Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_broadway.core.model.message import Message
from airflow_broadway.spark.results import Outcomes, is_frame, read

__all__ = ["fine_of", "is_frame", "messages_of"]


def messages_of(frame: Any) -> list[Message]:
    """Returns the messages of a DataFrame, in order of position."""
    rows = frame.select("position", "message_id", "attempt", "redelivered", "metadata").collect()
    return [
        Message(None, message_id=key, attempt=attempt, redelivered=redelivered, metadata=metadata)
        for _, key, attempt, redelivered, metadata in sorted(rows, key=lambda row: row[:2])
    ]


def fine_of(messages: Sequence[Message], returned: Any) -> list[Message]:
    """Returns the messages that succeeded, by the result of ``handle_batch`` on Spark."""
    results = read(returned)
    if isinstance(results, Outcomes):
        good = "ok" if results.status == "ok" else "lower(string(status)) IN ('ok', 'true')"
        ids = _ids(results.frame.where(good))
        return [m for m in messages if m.message_id in ids]
    bad = {key for part in results.parts for key in _ids(part.rows)} if results else set()
    return [m for m in messages if m.message_id not in bad]


def _ids(rows: Any) -> set[str]:
    """Returns the message ids of a DataFrame, or the given ids."""
    if not is_frame(rows):
        return set(rows)
    return {row["message_id"] for row in rows.select("message_id").collect()}
