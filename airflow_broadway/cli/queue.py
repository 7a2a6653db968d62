"""``airflow-broadway queue``: creates embedded queues and sends messages to them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from airflow_broadway.cli.output import CommandError, Result
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.sqlite.producer import path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue

#: Messages and bytes per transaction.
PORTION = 5_000
PORTION_BYTES = 16 * 1024 * 1024


def queue(args: argparse.Namespace) -> Result:
    """Creates a queue, or sends messages to it."""
    with SqliteQueue(_queue_path(args), args.queue) as target:
        return _create(target) if args.action == "create" else _send(target, args)


def _queue_path(args: argparse.Namespace) -> str:
    """Returns the path of the queue file, from ``--path`` or an Airflow connection."""
    if args.path is not None:
        return str(args.path)
    from airflow_broadway.adapters.connections import AirflowConnections

    return path_of(AirflowConnections().get(args.conn_id))


def _create(target: SqliteQueue) -> Result:
    created = target.name not in (target.names() or ())
    target.create()
    text = f"Created the queue {target.name!r}." if created else f"{target.name!r} exists already."
    return Result({"created": created}, [text])


def _send(target: SqliteQueue, args: argparse.Namespace) -> Result:
    sent = 0
    try:
        with _open_input(args.input) as lines:
            for portion in _split_portions(lines):
                sent += len(target.send(portion))
    except (BroadwayError, OSError) as error:
        if not sent:
            raise
        raise CommandError(f"sent {pluralize(sent, 'message')}, then: {error}") from error
    if not sent:
        source = "standard input" if args.input == "-" else repr(args.input)
        raise CommandError(f"nothing was sent: {source} has no line, or only empty ones")
    return Result({"sent": sent}, [f"Sent {pluralize(sent, 'message')} to {target.name!r}."])


@contextmanager
def _open_input(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with open(name, "rb") as file:
        yield file


def _split_portions(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the lines in portions, without line ends; empty lines are skipped."""
    portion: list[bytes] = []
    size = 0
    for line in lines:
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        if not body:
            continue
        portion.append(body)
        size += len(body)
        if len(portion) >= PORTION or size >= PORTION_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
