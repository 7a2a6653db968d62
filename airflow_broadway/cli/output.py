"""What the commands print: tables for people, JSON for programs, one line for an error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any, TextIO

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import escaped, printable

#: Characters of a reason in a table.
MAX_TEXT = 100


class CommandError(BroadwayError):
    """What was asked for cannot be done; the text says why, and what to do instead."""


#: Where results go while everything else that is printed goes to standard error.
_RESULTS: ContextVar[TextIO | None] = ContextVar("_RESULTS", default=None)


@contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Send to standard error what others print: Airflow's loggers, Spark, callbacks."""
    token = _RESULTS.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.reset(token)


class _Escaping(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, redacted(super().format(record)).split("\n")))


@contextmanager
def logging_at(level: int) -> Iterator[None]:
    """Log plain lines to standard error, whatever Airflow set up when it was imported."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Escaping("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    handlers, before = root.handlers, root.level
    root.handlers = [handler]
    root.setLevel(level)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(before)


def say(*lines: str) -> None:
    """Print lines for people."""
    # Ids and reasons are anybody's text: a terminal is to act on none of it.
    _print("\n".join(escaped(each) for line in lines for each in line.split("\n")))


def say_json(value: Any) -> None:
    """Print a value for programs."""
    _print(json.dumps(value, indent=1, default=str))


def _print(text: str) -> None:
    # Results are data, payloads among them: they are printed as they are, never masked.
    out = _RESULTS.get() or sys.stdout
    out.write(f"{text}\n")
    out.flush()


def complain(error: BaseException | str) -> None:
    """Print an error on one line, without the secrets of the addresses in it."""
    sys.stderr.write(f"airflow-broadway: error: {redacted(one_line(error))}\n")


def one_line(text: object) -> str:
    """``text`` on one line, without anything that a terminal would act on."""
    return printable(text)


def cut(text: object, limit: int = MAX_TEXT) -> str:
    """``text`` on one line of at most ``limit`` characters."""
    line = one_line(text)
    return line if len(line) <= limit else line[: limit - 1] + "…"
