"""``airflow-broadway queue``: the embedded queue from the command line."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from airflow_broadway.cli.output import CommandError, cut, say, say_json, table
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.sqlite.database import Database
from airflow_broadway.producers.sqlite.queue import SqliteQueue
from airflow_broadway.producers.sqlite.records import DeadLetter

__all__ = ["queue"]

#: Messages, and bytes of them, that are sent in one transaction.
PORTION = 5_000
PORTION_BYTES = 16 * 1024 * 1024


def queue(given: argparse.Namespace) -> int:
    """Carry out one action on one queue."""
    with SqliteQueue(given.path, given.queue) as opened:
        if given.action != "send":
            _check_there(opened)
        code: int = _ACTIONS[given.action](opened, given)
        return code


def _check_there(opened: SqliteQueue) -> None:
    """Refuse a file or a name that nothing was ever sent to: a mistyped one looks empty.

    :raises CommandError: Naming the queues that there are.
    """
    database = Database(opened.path)
    try:
        with database.open(create=False) as db:
            if db is None:
                raise CommandError(f"there is no queue file {opened.path}: correct --path")
            names = sorted(row[0] for row in db.execute("SELECT name FROM queues"))
    finally:
        database.close()
    if opened.name not in names:
        raise CommandError(
            f"the queue file {opened.path} has no queue {opened.name!r}; it has {names}"
        )


# --------------------------------------------------------------------------------------------------


def _send(opened: SqliteQueue, given: argparse.Namespace) -> int:
    sent = 0
    try:
        with _input(given.input) as lines:
            for portion in _portions(lines):
                sent += len(opened.send(portion))
    except (BroadwayError, OSError) as error:
        if not sent:
            raise
        raise CommandError(f"{sent} messages were sent, then: {error}") from error
    return _tell(given, {"sent": sent}, f"Sent {sent} messages to {opened.name!r}.")


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


def _depth(opened: SqliteQueue, given: argparse.Namespace) -> int:
    found = opened.depth()._asdict()
    if given.json:
        say_json({"queue": opened.name, "path": opened.path, **found})
        return 0
    age = found.pop("oldest_age")
    oldest = "" if age is None else f"; the oldest ready one arrived {age:.0f} s ago"
    say(", ".join(f"{count} {name}" for name, count in found.items()) + oldest)
    return 0


def _dead(opened: SqliteQueue, given: argparse.Namespace) -> int:
    found = opened.dead_letters(limit=given.limit)
    if given.json:
        say_json([_letter(each) for each in found])
        return 0
    if not found:
        say("No dead letters.")
        return 0
    rows = (
        (
            each.message_id,
            each.attempt,
            each.stage or None,
            each.died_at.isoformat(timespec="seconds"),
            cut(each.reason),
        )
        for each in found
    )
    say(*table(("message id", "attempt", "stage", "died at", "reason"), rows))
    total = opened.depth().dead
    if total > len(found):
        say(f"These are {len(found)} of {total}: --limit shows more.")
    return 0


def _letter(letter: DeadLetter) -> dict[str, Any]:
    value = letter._asdict()
    body: bytes = value.pop("body")
    try:
        value["body"] = body.decode("utf-8")
    except UnicodeDecodeError:
        value["body_base64"] = base64.b64encode(body).decode("ascii")
    return value


def _requeue(opened: SqliteQueue, given: argparse.Namespace) -> int:
    count = opened.requeue_dead(given.message_id)
    _tell(given, {"requeued": count}, f"Put {count} dead letters back into {opened.name!r}.")
    return _all_found(count, given.message_id)


def _purge(opened: SqliteQueue, given: argparse.Namespace) -> int:
    if given.ready:
        if given.message_id:
            raise CommandError("--message-id names dead letters: give it with --dead")
        count = opened.purge()
        text = f"Deleted {count} messages of {opened.name!r} that no run holds."
        return _tell(given, {"purged": count}, text)
    count = opened.purge_dead(given.message_id)
    _tell(given, {"purged": count}, f"Deleted {count} dead letters of {opened.name!r}.")
    return _all_found(count, given.message_id)


def _all_found(count: int, message_ids: list[str] | None) -> int:
    """1 if some of the ids that were named are no dead letters."""
    return int(message_ids is not None and count < len(set(message_ids)))


def _tell(given: argparse.Namespace, value: dict[str, Any], text: str) -> int:
    if given.json:
        say_json(value)
    else:
        say(text)
    return 0


_ACTIONS: dict[str, Callable[[SqliteQueue, argparse.Namespace], int]] = {
    "send": _send,
    "depth": _depth,
    "dead": _dead,
    "requeue": _requeue,
    "purge": _purge,
}
