"""Output of the commands: tables, JSON, and one line per error on standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import Any, NamedTuple, TextIO

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import escaped, printable, shorten

#: Characters of a reason in a table.
MAX_TEXT = 100


class CommandError(BroadwayError):
    """A command cannot be carried out; the text gives the reason and the way out."""


class Result(NamedTuple):
    """The result of a command.

    :param value: With ``--json``.
    :param lines: Without it.
    :param code: The exit code; 1: completed with findings.
    """

    value: Any
    lines: Iterable[str]
    code: int = 0


#: The stream of results while all other output goes to standard error.
_RESULTS: ContextVar[TextIO | None] = ContextVar("_RESULTS", default=None)


@contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Redirects all other output (Airflow's loggers, Spark, callbacks) to standard error."""
    token = _RESULTS.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.reset(token)


@contextmanager
def silenced() -> Iterator[None]:
    """Discards standard error, also of loggers and child processes that write to it directly."""
    sys.stderr.flush()
    original = os.dup(2)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, redacted(super().format(record)).split("\n")))


@contextmanager
def logging_at(level: int) -> Iterator[None]:
    """Logs plain lines to standard error instead of to the handlers that Airflow installed."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)  # a logger may have a level of its own
    handler.setFormatter(_EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    handlers, previous = root.handlers, root.level
    root.handlers = [handler]
    root.setLevel(level)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(previous)


def print_lines(*lines: str) -> None:
    """Prints lines of text."""
    # Ids and reasons are untrusted: no escape sequence may reach a terminal.
    _print("\n".join(escaped(part) for line in lines for part in line.split("\n")))


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    _print(json.dumps(value, indent=1, default=str))


def _print(text: str) -> None:
    # Results are data, including payloads: never masked.
    out = _RESULTS.get() or sys.stdout
    out.write(f"{text}\n")
    out.flush()


def print_error(error: BaseException | str) -> None:
    """Prints an error on one line, with secrets in addresses masked."""
    sys.stderr.write(f"airflow-broadway: error: {redacted(printable(error))}\n")


def cut(text: object, limit: int = MAX_TEXT) -> str:
    """Returns ``text`` on one line of at most ``limit`` characters."""
    return shorten(printable(text), limit)
