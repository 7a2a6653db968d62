"""Faults within a process: writes that are slow, fail, or stop it."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from airflow_broadway.producers.kafka import claims
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kit.state_files import StateFiles
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.staging.disk import Disk

_STAGING = ("create", "create_own", "replace", "sink")
_JOURNAL = ("create", "write")


class Writes:
    """Counts a process's writes so far: to files, and with ``all``, commits and to sockets too."""

    def __init__(self) -> None:
        self._files, self._all = itertools.count(1), itertools.count(1)
        self.all = 0

    def file(self) -> int:
        """The number of the write to a file that comes next."""
        return next(self._files)

    def any(self) -> int:
        """The number of the write that comes next, of all."""
        self.all = next(self._all)
        return self.all


@contextmanager
def harmed(harm: Mapping[str, Any]) -> Iterator[Writes]:
    """Harm this process; what it writes meanwhile is counted.

    ``slow_staging`` and ``slow_journal``: seconds that each write takes more.  ``fail_write``:
    which write to the staging folder finds the disk full.  ``freeze_at``: at which write, to the
    staging folder or a journal, the process stops until it gets SIGCONT.  ``freeze_at_any``:
    the same of all writes, those to the broker too.  ``young_queues``: queues of RabbitMQ are
    relied on as soon as they are declared.  ``no_grace``: what a lease of Kafka's held others take
    as soon as it is over.
    """
    staged, writes = itertools.count(1), Writes()

    def freeze(number: int, name: str) -> None:
        if number == harm.get(name):
            os.kill(os.getpid(), signal.SIGSTOP)

    def before(slow: float, *, staging: bool) -> None:
        if slow:
            time.sleep(slow)
        if staging and next(staged) == harm.get("fail_write"):
            raise OSError(errno.ENOSPC, "no space left on device")
        freeze(writes.file(), "freeze_at")
        freeze(writes.any(), "freeze_at_any")

    def around(function: Callable[..., Any], slow: float, *, staging: bool) -> Callable[..., Any]:
        def slower(*given: Any, **named: Any) -> Any:
            before(slow, staging=staging)
            return function(*given, **named)

        return slower

    def sending(function: Callable[..., Any]) -> Callable[..., Any]:
        def send(self: socket.socket, *given: Any) -> Any:
            if self.family == socket.AF_INET:  # not to the watching process
                freeze(writes.any(), "freeze_at_any")
            return function(self, *given)

        return send

    def committing(function: Callable[..., Any]) -> Callable[..., Any]:
        """Kafka's client is no Python: its sockets are not seen."""

        def commit(*given: Any) -> Any:
            freeze(writes.any(), "freeze_at_any")
            return function(*given)

        return commit

    class Committing(sqlite3.Connection):
        def execute(self, sql: str, *given: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                freeze(writes.any(), "freeze_at_any")
            return super().execute(sql, *given)

    with ExitStack() as stack:

        def change(place: Any, name: str, changed: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, changed))

        for name in _STAGING:
            slow = harm.get("slow_staging", 0.0)
            change(Disk, name, around(getattr(Disk, name), slow, staging=True))
        for name in _JOURNAL:
            slow = harm.get("slow_journal", 0.0)
            change(StateFiles, name, around(getattr(StateFiles, name), slow, staging=False))
        change(Cluster, "commit", committing(Cluster.commit))
        change(sqlite3, "connect", partial(sqlite3.connect, factory=Committing))
        for name in ("send", "sendall"):
            change(socket.socket, name, sending(getattr(socket.socket, name)))
        if harm.get("young_queues"):
            change(standing_queues, "_RELIABLE_AGE", 0.0)
        if harm.get("no_grace"):
            change(claims, "GRACE_SECONDS", 0.0)
        yield writes
