"""What ``handle_batch`` gets and returns on Spark, read from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_broadway.core.model.message import Message
from airflow_broadway.spark.results import Outcomes, is_frame, read

__all__ = ["fine_of", "is_frame", "messages_of"]


def messages_of(frame: Any) -> list[Message]:
    """The messages of a DataFrame, whose rows have no order."""
    rows = frame.select("position", "message_id", "attempt", "redelivered", "metadata").collect()
    return [
        Message(None, message_id=key, attempt=attempt, redelivered=redelivered, metadata=metadata)
        for _, key, attempt, redelivered, metadata in sorted(rows, key=lambda row: row[:2])
    ]


def fine_of(messages: Sequence[Message], came: Any) -> list[Message]:
    """The messages that succeeded, by what ``handle_batch`` returned on Spark."""
    found = read(came)
    if isinstance(found, Outcomes):
        good = "ok" if found.status == "ok" else "lower(string(status)) IN ('ok', 'true')"
        ids = _ids(found.frame.where(good))
        return [m for m in messages if m.message_id in ids]
    bad = {key for part in found.parts for key in _ids(part.rows)} if found else set()
    return [m for m in messages if m.message_id not in bad]


def _ids(rows: Any) -> set[str]:
    """The ids of a DataFrame of messages, or those that are given."""
    if not is_frame(rows):
        return set(rows)
    return {row["message_id"] for row in rows.select("message_id").collect()}
