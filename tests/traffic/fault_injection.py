"""Injects faults into this process: writes that are slow, fail, or stop the process."""

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
    """Counts this process's writes to files, and all writes: files, commits and sockets."""

    def __init__(self) -> None:
        self._files, self._all = itertools.count(1), itertools.count(1)
        self.all = 0

    def file(self) -> int:
        """Counts a write to a file; returns its number."""
        return next(self._files)

    def any(self) -> int:
        """Counts a write of any kind; returns its number."""
        self.all = next(self._all)
        return self.all


@contextmanager
def inject_faults(faults: Mapping[str, Any]) -> Iterator[Writes]:
    """Injects faults into this process, and counts its writes.

    ``slow_staging`` and ``slow_journal`` add seconds to each write.  ``fail_write`` is the number
    of the write to the staging folder that finds the disk full.  ``freeze_at`` is the number of the
    write, to the staging folder or a journal, before which the process stops itself with SIGSTOP;
    ``freeze_at_any`` counts all writes, including those to the broker.  ``young_queues`` makes
    RabbitMQ's queues count as reliable immediately after their declaration.  ``no_grace`` lets
    other runs take a Kafka claim immediately after its lease has expired.
    """
    staged, writes = itertools.count(1), Writes()

    def freeze(number: int, name: str) -> None:
        if number == faults.get(name):
            os.kill(os.getpid(), signal.SIGSTOP)

    def before(slow: float, *, staging: bool) -> None:
        if slow:
            time.sleep(slow)
        if staging and next(staged) == faults.get("fail_write"):
            raise OSError(errno.ENOSPC, "no space left on device")
        freeze(writes.file(), "freeze_at")
        freeze(writes.any(), "freeze_at_any")

    def around(function: Callable[..., Any], slow: float, *, staging: bool) -> Callable[..., Any]:
        def slower(*args: Any, **kwargs: Any) -> Any:
            before(slow, staging=staging)
            return function(*args, **kwargs)

        return slower

    def sending(function: Callable[..., Any]) -> Callable[..., Any]:
        def send(self: socket.socket, *args: Any) -> Any:
            if self.family == socket.AF_INET:  # not to the test process
                freeze(writes.any(), "freeze_at_any")
            return function(self, *args)

        return send

    def committing(function: Callable[..., Any]) -> Callable[..., Any]:
        """Counts commits: the sockets of Kafka's client, a C library, cannot be intercepted."""

        def commit(*args: Any) -> Any:
            freeze(writes.any(), "freeze_at_any")
            return function(*args)

        return commit

    class Committing(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                freeze(writes.any(), "freeze_at_any")
            return super().execute(sql, *args)

    with ExitStack() as stack:

        def change(place: Any, name: str, changed: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, changed))

        for name in _STAGING:
            slow = faults.get("slow_staging", 0.0)
            change(Disk, name, around(getattr(Disk, name), slow, staging=True))
        for name in _JOURNAL:
            slow = faults.get("slow_journal", 0.0)
            change(StateFiles, name, around(getattr(StateFiles, name), slow, staging=False))
        change(Cluster, "commit", committing(Cluster.commit))
        change(sqlite3, "connect", partial(sqlite3.connect, factory=Committing))
        for name in ("send", "sendall"):
            change(socket.socket, name, sending(getattr(socket.socket, name)))
        if faults.get("young_queues"):
            change(standing_queues, "_RELIABLE_AGE", 0.0)
        if faults.get("no_grace"):
            change(claims, "GRACE_SECONDS", 0.0)
        yield writes
