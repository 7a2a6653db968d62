"""Of which generation, batch and message a log line speaks.

Each id is a context variable.  Airflow's log (structlog) adds every variable whose name begins with
``structlog_`` to each line, as it does its own ``dag_id``, ``run_id`` and ``task_id``: nothing of
it is imported here.  Where the log is plain, in a Spark driver and in a processor's own process,
:func:`log_plainly` does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Final, TypeVar

R = TypeVar("R")

_PREFIX: Final = "structlog_"

#: What is bound here, in the order of a plain line; in a task ``run_id`` is Airflow's.
LOGGED_IDS: Final = ("dag_id", "run_id", "generation", "batcher", "batch_id", "message_id")

_VARIABLES: Final[Mapping[str, ContextVar[Any]]] = {
    name: ContextVar(f"{_PREFIX}{name}") for name in LOGGED_IDS
}

#: Name the message that is spoken of from now on, within ``log_ids(message_id=None)``: for a loop
#: that every message goes through.
speak_of: Final[Callable[[str], object]] = _VARIABLES["message_id"].set


@contextmanager
def log_ids(**ids: str | None) -> Iterator[None]:
    """Have lines that are logged within name these ids; ``None``: none of this kind."""
    # To structlog, too, an Ellipsis is a variable without a value.
    tokens = [
        (variable, variable.set(... if value is None else value))
        for variable, value in ((_VARIABLES[name], value) for name, value in ids.items())
    ]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def ids_now() -> dict[str, str]:
    """The ids that a line logged now would name, of :data:`LOGGED_IDS`; whoever bound them."""
    found = {each.name: value for each, value in _bound().items()}
    known = ((name, found.get(f"{_PREFIX}{name}")) for name in LOGGED_IDS)
    return {name: str(value) for name, value in known if value is not None}


def keep_ids(function: Callable[..., R]) -> Callable[..., R]:
    """``function`` for another thread: what it logs there names the ids of here and now.

    A thread starts without any.  It gets these variables alone: the others are of the callback
    that may be at work here, such as what it has settled.
    """
    bound = _bound()

    def kept(*args: Any, **options: Any) -> R:
        context = copy_context()
        for variable, value in bound.items():
            context.run(variable.set, value)
        return context.run(function, *args, **options)

    return kept


def _bound() -> dict[ContextVar[Any], Any]:
    """The variables that have a value, Airflow's as well."""
    return {
        variable: value
        for variable, value in copy_context().items()
        if variable.name.startswith(_PREFIX) and value is not ...
    }


class _Formatter(logging.Formatter):
    """Ends each message with the ids, before a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        # As Python writes them: a message's id may hold a line break, which would forge a line.
        ids = " ".join(f"{name}={value!r}" for name, value in ids_now().items())
        return super().formatMessage(record) + (f" [{ids}]" if ids else "")


def log_plainly(form: str = logging.BASIC_FORMAT) -> None:
    """Log to standard error from ``INFO`` on, with ids; nothing if logging is set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
