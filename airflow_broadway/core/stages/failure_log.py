"""Logs the failures of a run: the first of each kind in full, all of them by reason.

A line and a traceback for every message would flood the log, and cost more than the work.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize

#: Failures of each kind that are logged individually; a kind is a callback and an exception type.
LOGGED_FAILURES: Final = 10

#: The number of distinct reasons that are kept, and of those that are logged.
_KEPT_REASONS: Final = 500
_SHOWN_REASONS: Final = 20
_OTHERS: Final = "(other reasons)"

_DIGITS: Final = b"0123456789"
_lock = threading.Lock()
log = logging.getLogger(__name__)


def count_failure(pipeline: Pipeline, callback: str, error: BaseException) -> int:
    """Counts a failure; returns its number among its kind in this process, from 1."""
    key = callback, type(error)
    with _lock:
        counts: Counter[Any] = pipeline.__dict__.setdefault("_failures", Counter())
        counts[key] += 1
        return counts[key]


def log_stuck(where: str, chunks: Iterable[list[Message]]) -> None:
    """Logs which messages callbacks were still handling when their run ended, at most ten."""
    ids = [message.message_id for chunk in chunks for message in chunk]
    if ids:
        log.warning(
            "%s was still at %s when the run ended; messages not settled by then are released",
            where,
            name_messages(ids),
        )


def name_messages(ids: Sequence[str]) -> str:
    """Names messages in a log line: one by its id, several by number and the first ten ids."""
    if len(ids) == 1:
        return f"message {ids[0]!r}"
    names = ", ".join(map(repr, ids[:LOGGED_FAILURES]))
    more = ", …" if len(ids) > LOGGED_FAILURES else ""
    return f"{pluralize(len(ids), 'message')} ({names}{more})"


def forget_trace(error: Any) -> None:
    """Drops an exception's traceback, once it is not needed any more.

    Its frames reference the list of failed messages, and so the exception again.  Such reference
    cycles wait for the garbage collector, which costs more than the messages.
    """
    while isinstance(error, BaseException) and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Reasons:
    """Counts failed messages by their reason; reasons that differ only in digits are one."""

    def __init__(self) -> None:
        # Keyed by the reason without its digits.
        self._counts: Counter[bytes] = Counter()
        self._shown: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def add(self, failed: Iterable[Message]) -> None:
        """Counts messages; consecutive messages with one status are cheap."""
        new: dict[bytes, list[Any]] = {}
        last: Any = None
        entry: list[Any] = []
        for message in failed:
            status = message.status
            if status is not last:
                last, text = status, status.text
                line = text[:200].splitlines()[0] if text else "(no reason)"
                key = line.encode().translate(None, _DIGITS)
                entry = new.get(key) or new.setdefault(key, [line, 0])
            entry[1] += 1
        with self._lock:
            for key, (line, count) in new.items():
                if key not in self._shown:
                    if len(self._shown) >= _KEPT_REASONS:
                        line, key = _OTHERS, _OTHERS.encode()
                    self._shown.setdefault(key, line)
                self._counts[key] += count

    def most(self, number: int) -> list[dict[str, Any]]:
        """Returns the most frequent reasons, as rows of a report."""
        with self._lock:
            rows = self._counts.most_common(number)
        return [{"count": n, "stage": "", "reason": self._shown[key]} for key, n in rows]

    def log_table(self, log: Any, where: str) -> None:
        """Logs the table of reasons, if any message failed."""
        with self._lock:
            rows = self._counts.most_common()
        if not rows:
            return
        lines = [f"{count:>11,}  {self._shown[key]}" for key, count in rows[:_SHOWN_REASONS]]
        rest = [count for _, count in rows[_SHOWN_REASONS:]]
        if rest:
            lines.append(f"{sum(rest):>11,}  {pluralize(len(rest), 'more reason')}")
        failed = pluralize(sum(count for _, count in rows), "message")
        log.error("%s failed in %s, by reason:\n%s", failed, where, "\n".join(lines))
