"""``airflow-broadway queue``: the embedded queue from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from airflow_broadway.cli.output import CommandError, say, say_json
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.text import many
from airflow_broadway.producers.sqlite.producer import path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue

#: Messages, and bytes of them, that are sent in one transaction.
PORTION = 5_000
PORTION_BYTES = 16 * 1024 * 1024


def queue(given: argparse.Namespace) -> int:
    """Creates a queue, or sends messages to it."""
    with SqliteQueue(_path(given), given.queue) as opened:
        return {"create": _create, "send": _send}[given.action](opened, given)


def _path(given: argparse.Namespace) -> str:
    """The queue file: as given, or that of an Airflow connection."""
    if given.path is not None:
        return str(given.path)
    from airflow_broadway.adapters.connections import AirflowConnections

    return path_of(AirflowConnections().get(given.conn_id))


def _create(opened: SqliteQueue, given: argparse.Namespace) -> int:
    created = opened.name not in (opened.names() or ())
    opened.create()
    text = f"Created the queue {opened.name!r}." if created else f"{opened.name!r} exists already."
    return _say_result(given, {"created": created}, text)


def _send(opened: SqliteQueue, given: argparse.Namespace) -> int:
    sent = 0
    try:
        with _input(given.input) as lines:
            for portion in _portions(lines):
                sent += len(opened.send(portion))
    except (BroadwayError, OSError) as error:
        if not sent:
            raise
        raise CommandError(f"sent {many(sent, 'message')}, then: {error}") from error
    return _say_result(given, {"sent": sent}, f"Sent {many(sent, 'message')} to {opened.name!r}.")


@contextmanager
def _input(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with open(name, "rb") as file:
        yield file


def _portions(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines without their ends, in portions; empty ones are no messages."""
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


def _say_result(given: argparse.Namespace, value: dict[str, Any], text: str) -> int:
    if given.json:
        say_json(value)
    else:
        say(text)
    return 0
