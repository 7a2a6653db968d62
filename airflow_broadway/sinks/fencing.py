"""Helpers of the tables' clients: which attempt may commit, and errors in one line."""

from __future__ import annotations

import importlib
from typing import Any, Final

from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.sink import Commit, CommitRefused, SinkError

#: The attempt that a tombstone records; those of commits begin at 1.
RULED_OUT: Final = 0
#: A sink's option ``time_column``.
TIME_COLUMN: Final = (
    "The column of timestamps by which a backfill deletes the rows of its interval first; without"
    " it they stay."
)
#: Days for which commit ids are kept at least: longer than any broker retains a message.
KEPT_DAYS: Final = 32


def check_time_column(uri: str, column: str, kind: str | None) -> None:
    """Checks the type of a time column: text and dates do not compare as instants.

    :param kind: Its type in the table; ``None`` if there is no such column.
    :raises SinkError: If it is not a timestamp.
    """
    if kind is None or not kind.startswith("timestamp"):
        raise SinkError(
            f"the time_column {column!r} of {uri} must be a column of timestamps, and is"
            f" {kind or 'missing'}"
        )


def has_landed(attempt: int | None, commit: Commit, uri: str) -> bool:
    """Returns whether this attempt has landed already.

    :param attempt: The attempt that the table records for the commit id; ``None`` if none.
    :raises CommitRefused: If it records another one, or a tombstone.
    """
    if attempt is None or attempt == commit.attempt:
        return attempt is not None
    if attempt == RULED_OUT:
        reason = "it was ruled out, since its run had been settled or had lost its lease"
    else:
        reason = f"attempt {attempt} has landed"
    raise CommitRefused(
        f"{uri} refuses attempt {commit.attempt} of commit {commit.commit_id}: {reason}; nothing"
        " was written"
    )


def import_client(module: str, extra: str) -> Any:
    """Imports a client library.

    :raises SinkError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SinkError(
            f"{module} is not installed where this sink is opened: pip install"
            f" 'airflow-broadway[{extra}]'"
        ) from None


def spark_reason(error: Exception) -> str:
    """Returns the first line of an error of Spark: of Java's innermost, if it has one."""
    java: Any = getattr(error, "java_exception", None)
    if java is None:
        return reason_of(error)
    while (cause := java.getCause()) is not None:
        java = cause
    return reason_of(RuntimeError(java.toString())).removeprefix("RuntimeError: ")
