"""Logs context: the generation, batch and message of a log line.

Each id is a context variable.  Airflow's log (structlog) adds every variable whose name begins with
``structlog_`` to each line, as it does its own ``dag_id``, ``run_id`` and ``task_id``; structlog is
not imported here.  :func:`log_plainly` adds them to plain logs, in a Spark driver and in a
processor's child process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Final, TypeVar

R = TypeVar("R")

_PREFIX: Final = "structlog_"

#: The ids bound here, in the order of a plain line; in a task ``run_id`` is Airflow's.
LOGGED_IDS: Final = ("dag_id", "run_id", "generation", "batcher", "batch_id", "message_id")

_VARIABLES: Final[Mapping[str, ContextVar[Any]]] = {
    name: ContextVar(f"{_PREFIX}{name}") for name in LOGGED_IDS
}

#: Sets the current message's id, within ``log_ids(message_id=None)``; cheap enough for a loop over
#: every message.
speak_of: Final[Callable[[str], object]] = _VARIABLES["message_id"].set


@contextmanager
def log_ids(**ids: str | None) -> Iterator[None]:
    """Binds ids to the log lines within the block; ``None`` unbinds an id."""
    # structlog treats an Ellipsis as unset, too.
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
    """Returns the ids of :data:`LOGGED_IDS` that a log line would carry now, Airflow's included."""
    ids = {variable.name: value for variable, value in _bound_variables().items()}
    known = ((name, ids.get(f"{_PREFIX}{name}")) for name in LOGGED_IDS)
    return {name: str(value) for name, value in known if value is not None}


def keep_ids(function: Callable[..., R]) -> Callable[..., R]:
    """Wraps ``function`` for another thread, so that its log lines carry the ids bound here.

    A new thread starts without context variables.  Only these variables are copied: others belong
    to the running callback, such as the messages that it has settled.
    """
    bound = _bound_variables()

    def run_with_ids(*args: Any, **kwargs: Any) -> R:
        context = copy_context()
        for variable, value in bound.items():
            context.run(variable.set, value)
        return context.run(function, *args, **kwargs)

    return run_with_ids


def _bound_variables() -> dict[ContextVar[Any], Any]:
    """Returns the variables that have a value, Airflow's included."""
    return {
        variable: value
        for variable, value in copy_context().items()
        if variable.name.startswith(_PREFIX) and value is not ...
    }


class _Formatter(logging.Formatter):
    """Appends the ids to each message, before a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        # As repr: a message id may contain a line break, which would forge a log line.
        ids = " ".join(f"{name}={value!r}" for name, value in ids_now().items())
        return super().formatMessage(record) + (f" [{ids}]" if ids else "")


def log_plainly(form: str = logging.BASIC_FORMAT) -> None:
    """Logs to standard error from ``INFO`` on, with ids; no effect if logging is configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
