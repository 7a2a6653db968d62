"""What a task's log has of lines of plain ``logging``: the ids that structlog adds to each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog


class Lines(logging.Handler):
    """Keeps each line with its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        ids = structlog.contextvars.merge_contextvars(None, "info", {})
        self.kept.append((record.getMessage(), dict(ids)))

    def of(self, text: str) -> list[dict[str, Any]]:
        """The ids of each line that begins so."""
        return [ids for line, ids in self.kept if line.startswith(text)]


@contextmanager
def logged(**ids: str) -> Iterator[Lines]:
    """Keep what is logged within, in a task that names ``ids``, as Airflow does its run's."""
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
