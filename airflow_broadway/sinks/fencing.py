"""What the tables' clients share: who may commit, and how an unclear error is resolved."""

from __future__ import annotations

import importlib
import time
from typing import Any, Final

from airflow_broadway.core.masking import redacted
from airflow_broadway.core.model.sink import (
    Commit,
    CommitInDoubt,
    CommitRefused,
    RulingClient,
    SinkError,
)

#: The attempt that a tombstone records; those of commits begin at 1.
RULED_OUT: Final = 0
#: Days for which commit ids are kept at least: longer than any broker retains a message.
KEPT_DAYS: Final = 32
#: Seconds before each try to rule out a commit after an error.
_PAUSES: Final = (0.0, 0.5, 1.0, 2.0, 4.0)


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


def resolve(client: RulingClient, commit: Commit, uri: str, error: Exception) -> None:
    """Resolves an error after which the commit may have landed: rules it out.

    Returns if it has landed.

    :raises CommitRefused: If another attempt has landed.
    :raises CommitInDoubt: If the table cannot be reached.
    :raises SinkError: If it never lands.
    """
    reason = reason_of(error)
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            attempts = client.rule_out([commit.commit_id])
            break
        except SinkError:
            continue
    else:
        raise CommitInDoubt(
            f"{uri} failed during commit {commit.commit_id} and cannot be reached: {reason}.  Its"
            " rows may have landed; the run's settlement finds out before it settles the messages"
        ) from None
    if not has_landed(attempts.get(commit.commit_id), commit, uri):
        raise SinkError(
            f"{uri} failed during commit {commit.commit_id}: {reason}.  Nothing was written, and"
            " the commit is ruled out"
        ) from None


def reason_of(error: Exception) -> str:
    """Returns the first line of a client's error, without credentials."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {redacted(lines[0])[:500]}" if lines else type(error).__name__


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
