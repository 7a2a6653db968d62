"""``airflow-broadway queue``: the embedded queue from the command line."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from airflow_broadway.cli.output import CommandError, cut, say, say_json
from airflow_broadway.core.custody.dead_letters import DeadLetter
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.text import many, table
from airflow_broadway.producers.sqlite.options import path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue

__all__ = ["queue"]

#: Messages, and bytes of them, that are sent in one transaction.
PORTION = 5_000
PORTION_BYTES = 16 * 1024 * 1024


def queue(given: argparse.Namespace) -> int:
    """Carry out one action on one queue, or list all queues of a file."""
    if given.action == "list":
        return _list(given)
    with SqliteQueue(_path(given), given.queue) as opened:
        if given.action not in ("create", "send"):
            _check_there(opened)
        code: int = _ACTIONS[given.action](opened, given)
        return code


def _path(given: argparse.Namespace) -> str:
    """The queue file: as given, or that of an Airflow connection."""
    if given.path is not None:
        return str(given.path)
    from airflow_broadway.adapters.connections import AirflowConnections

    return path_of(AirflowConnections().get(given.conn_id))


def _check_there(opened: SqliteQueue) -> None:
    """Refuse a file or a name that nothing was ever sent to: a mistyped one looks empty.

    :raises CommandError: Naming the queues that there are.
    """
    names = opened.names()
    if names is None:
        raise CommandError(f"there is no queue file {opened.path}: correct --path")
    if opened.name not in names:
        raise CommandError(
            f"the queue file {opened.path} has no queue {opened.name!r}; it has {names}"
        )


def _list(given: argparse.Namespace) -> int:
    path = _path(given)
    with SqliteQueue(path, "-") as file:
        names = file.names()
    if names is None:
        raise CommandError(f"there is no queue file {path}: correct --path")
    depths: dict[str, QueueDepth] = {}
    for name in names:
        with SqliteQueue(path, name) as opened:
            depths[name] = opened.depth()
    if given.json:
        say_json([{"queue": name, **depth._asdict()} for name, depth in depths.items()])
    elif not depths:
        say("No queues.")
    else:
        rows = (
            (name, *depth[:4], None if depth.oldest_age is None else round(depth.oldest_age))
            for name, depth in depths.items()
        )
        say(*table(("queue", "ready", "delayed", "leased", "dead", "oldest (s)"), rows))
    return 0


# --------------------------------------------------------------------------------------------------


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
    if given.by_reason:
        return _reasons(opened, given)
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
            each.died_at and each.died_at.isoformat(timespec="seconds"),
            cut(each.reason),
        )
        for each in found
    )
    say(*table(("message id", "attempt", "stage", "died at", "reason"), rows))
    total = opened.depth().dead
    if total > len(found):
        say(f"These are {len(found)} of {total}: --limit shows more, --by-reason counts them.")
    return 0


def _reasons(opened: SqliteQueue, given: argparse.Namespace) -> int:
    found = opened.dead_reasons()
    if given.json:
        names = ("reason", "stage", "count")
        say_json([dict(zip(names, each, strict=True)) for each in found])
    elif not found:
        say("No dead letters.")
    else:
        rows = ((count, stage or None, cut(reason)) for reason, stage, count in found)
        say(*table(("count", "stage", "reason"), rows))
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
    unknown = _unknown(opened, given)
    count = opened.requeue_dead(given.message_id)
    return _say_letters(
        given,
        {"requeued": count},
        f"Put {many(count, 'dead letter')} back into {opened.name!r}.",
        unknown,
    )


def _purge(opened: SqliteQueue, given: argparse.Namespace) -> int:
    if given.ready:
        if given.message_id:
            raise CommandError("--message-id names dead letters: give it with --dead")
        ready, delayed = opened.depth()[:2]
        _check_yes(
            given, f"{many(ready + delayed, 'message')} of {opened.name!r} that no run holds"
        )
        count = opened.purge()
        text = f"Deleted {many(count, 'message')} of {opened.name!r} that no run holds."
        return _say_result(given, {"purged": count}, text)
    unknown = _unknown(opened, given)
    named = list(dict.fromkeys(given.message_id or ()))
    count = len(named) - len(unknown) if named else opened.depth().dead
    _check_yes(given, f"{many(count, 'dead letter')} of {opened.name!r}")
    count = opened.purge_dead(given.message_id)
    return _say_letters(
        given,
        {"purged": count},
        f"Deleted {many(count, 'dead letter')} of {opened.name!r}.",
        unknown,
    )


def _check_yes(given: argparse.Namespace, what: str) -> None:
    """Refuse to delete what nothing can bring back without a confirmation.

    :raises CommandError: Naming what would be deleted.
    """
    if not given.yes:
        raise CommandError(f"nothing was deleted: use --yes to delete {what} for good")


def _unknown(opened: SqliteQueue, given: argparse.Namespace) -> list[str]:
    """The ids that were named and are no dead letters."""
    named = list(dict.fromkeys(given.message_id or ()))
    known = opened.dead_among(named) if named else set()
    return [each for each in named if each not in known]


def _say_letters(
    given: argparse.Namespace, value: dict[str, Any], text: str, unknown: list[str]
) -> int:
    """Print what was done; 1 if some of the ids that were named are no dead letters."""
    if unknown:
        value["unknown"] = unknown
        text += f"\nThese are no dead letters of it: {', '.join(unknown)}."
    _say_result(given, value, text)
    return int(bool(unknown))


def _say_result(given: argparse.Namespace, value: dict[str, Any], text: str) -> int:
    if given.json:
        say_json(value)
    else:
        say(text)
    return 0


_ACTIONS: dict[str, Callable[[SqliteQueue, argparse.Namespace], int]] = {
    "create": _create,
    "send": _send,
    "depth": _depth,
    "dead": _dead,
    "requeue": _requeue,
    "purge": _purge,
}
