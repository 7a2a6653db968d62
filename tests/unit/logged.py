"""The ids that structlog adds to lines of plain ``logging`` in a task's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog


class Lines(logging.Handler):
    """Records lines with their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        ids = structlog.contextvars.merge_contextvars(None, "info", {})
        self.records.append((record.getMessage(), dict(ids)))

    def of(self, text: str) -> list[dict[str, Any]]:
        """The ids of the lines with this prefix."""
        return [ids for line, ids in self.records if line.startswith(text)]


@contextmanager
def logged(**ids: str) -> Iterator[Lines]:
    """Record the log lines of a task whose context has ``ids``, as Airflow sets its run's."""
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with structlog.contextvars.bound_contextvars(**ids):
            yield handler
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
