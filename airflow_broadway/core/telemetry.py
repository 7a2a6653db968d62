"""What the pipeline reports of itself: Broadway's events, by Broadway's names.

A handler is called in the thread (and for ``executor="processes"`` in the parent process) that does
the work, with the event's name, its measurements and its metadata::

    attach(lambda event, measurements, metadata: print(event), events=["batch_processor.stop"])

With no handler for an event its emitter does nothing but look at :func:`handlers`, once per chunk
or batch.  A handler that raises is detached, and the error logged: it never hurts the run.
``docs/telemetry.md`` lists the events.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

__all__ = [
    "EVENTS",
    "Handler",
    "Span",
    "attach",
    "detach",
    "emit",
    "handlers",
    "heard",
    "log_handler",
]

log = logging.getLogger(__name__)

#: ``handler(event, measurements, metadata)``; instants and durations are seconds.
Handler = Callable[[str, Mapping[str, float], Mapping[str, Any]], None]

_SPANS: Final = (
    "processor",
    "processor.message",
    "batcher",
    "batch_processor",
    "handle_failed",
    "sqs.receive_messages",
    "pubsub.receive_messages",
)

#: Every event there is.
EVENTS: Final[tuple[str, ...]] = (
    "topology.init",
    "run.stop",
    *(f"{span}.{end}" for span in _SPANS for end in ("start", "stop", "exception")),
)

_lock = threading.Lock()
_attached: dict[str, tuple[frozenset[str], Handler]] = {}
#: Event → its handlers: replaced as a whole under the lock, read without it.
_table: dict[str, tuple[tuple[str, Handler], ...]] = {}
_numbers = itertools.count(1)


def attach(
    handler: Handler, *, events: Iterable[str] | None = None, handler_id: str | None = None
) -> str:
    """Call ``handler`` with each of ``events`` from now on; returns the id for :func:`detach`.

    :param events: All of :data:`EVENTS` unless given.
    :param handler_id: Unique; made up unless given.
    :raises ValueError: If an event is unknown, or the id is in use.
    """
    wanted = frozenset(EVENTS if events is None else events)
    unknown = sorted(wanted - set(EVENTS))
    if unknown:
        raise ValueError(f"unknown telemetry events {unknown}, valid events are: {list(EVENTS)}")
    with _lock:
        name = handler_id or f"handler-{next(_numbers)}"
        if name in _attached:
            raise ValueError(f"a telemetry handler with the id {name!r} is attached already")
        _attached[name] = (wanted, handler)
        _rebuild()
    return name


def detach(handler_id: str) -> bool:
    """Stop calling a handler; whether it was attached."""
    with _lock:
        found = _attached.pop(handler_id, None) is not None
        _rebuild()
    return found


def _rebuild() -> None:
    table: dict[str, tuple[tuple[str, Handler], ...]] = {}
    for name, (events, handler) in _attached.items():
        for event in events:
            table[event] = (*table.get(event, ()), (name, handler))
    global _table  # noqa: PLW0603 - one registry per process, as in Elixir
    _table = table


def handlers(*events: str) -> bool:
    """Whether any of ``events`` has a handler; all events when none is named."""
    table = _table
    if not table:
        return False
    return not events or any(event in table for event in events)


def heard() -> bool:
    """Whether any event has a handler: the cheapest question, for what is asked at each chunk."""
    return bool(_table)


def wanted() -> list[str]:
    """The events that have a handler."""
    return list(_table)


def emit(event: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
    """Call the handlers of ``event``."""
    for name, handler in _table.get(event, ()):
        try:
            handler(event, measurements, metadata)
        except (Exception, SystemExit):  # it may be a program's, meant to end that
            detach(name)
            log.exception("telemetry handler %r raised on %r and has been detached", name, event)


class Span:
    """One span: emits ``<name>.start`` when made, then ``stop`` or ``exception``.

    :param metadata: Of the start event; the exception event repeats it.
    """

    __slots__ = ("_metadata", "_name", "_started")

    def __init__(self, name: str, metadata: dict[str, Any]) -> None:
        self._name = name
        metadata["telemetry_span_context"] = (os.getpid(), next(_numbers))
        self._metadata = metadata
        self._started = time.monotonic()
        emit(
            f"{name}.start",
            {"system_time": time.time(), "monotonic_time": self._started},
            metadata,
        )

    def stop(self, metadata: dict[str, Any]) -> None:
        """Emit the stop event; its metadata is its own set, not the start's plus more."""
        metadata["telemetry_span_context"] = self._metadata["telemetry_span_context"]
        self._end("stop", metadata)

    def exception(self, kind: str, reason: Any, stacktrace: str) -> None:
        """Emit the exception event."""
        self._end(
            "exception",
            {**self._metadata, "kind": kind, "reason": reason, "stacktrace": stacktrace},
        )

    def _end(self, end: str, metadata: dict[str, Any]) -> None:
        now = time.monotonic()
        emit(
            f"{self._name}.{end}",
            {"duration": now - self._started, "monotonic_time": now},
            metadata,
        )


def log_handler(logger: logging.Logger | None = None, level: int = logging.INFO) -> Handler:
    """A handler that logs each event as one line of JSON: counts in place of messages, no data.

    ::

        attach(log_handler(), events=["processor.stop", "batch_processor.stop"])
    """
    target = logger or logging.getLogger("airflow_broadway.telemetry")

    def handle(event: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        if target.isEnabledFor(level):
            line = {"event": event, **measurements, **_described(metadata)}
            target.log(level, json.dumps(line, default=str), extra={"broadway_event": line})

    return handle


def _described(metadata: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for name, value in metadata.items():
        if isinstance(value, list):
            line[f"{name}_count"] = len(value)
        elif name == "message":
            line["message_id"] = value.message_id
        elif name == "batch_info":
            line |= {"batch_id": value.batch_id, "size": value.size, "trigger": value.trigger.value}
        elif name == "reason":
            line["reason"] = f"{type(value).__name__}: {value}"
        elif isinstance(value, str | int | float) and name != "stacktrace":
            line[name] = value
    return line
