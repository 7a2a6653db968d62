"""Bundles that came back, because their lease lapsed or was given up.

Who reads one first asks the journal of the generation that held it: what was settled or published
again is dropped, the rest is handled, marked as redelivered.  Messages whose process died again and
again come in ever smaller portions, each alone in its run, until one that still kills its process
is known by itself and set aside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header, Held
from airflow_broadway.producers.rabbitmq.journal import Journal, digest

__all__ = ["Portion", "examine", "load_staged", "portion_limit", "split", "store_staged"]

#: The names that bundles are given.
_NAME = re.compile(r"[0-9a-f]+\.[0-9a-f]+")


class Portion(NamedTuple):
    """What becomes of a returned bundle.

    :param take: Messages to secure now.
    :param later: Messages to put back.
    :param crashed: Messages to set aside, because each killed its process while it was alone.
    :param alone: Whether what is taken must be all that this generation holds.
    """

    take: list[Held]
    later: list[Held]
    crashed: list[Held]
    alone: bool


def portion_limit(crashes: int, max_crashes: int) -> int | None:
    """How many messages of so many crashes one generation may hold; ``None``: any number.

    The first crash is the machine's more often than the message's.  From the second on the portion
    shrinks tenfold with each, and is 1 for who crashed more than ``max_crashes`` times.
    """
    if crashes <= 1 and max_crashes >= 1:
        return None
    return int(10 ** min(9, max(0, max_crashes + 1 - crashes)))


def split(messages: list[Held], *, room: int, fresh: bool, max_crashes: int) -> Portion | None:
    """Divide a returned bundle; ``None`` if it must wait for a generation of its own.

    :param room: The most messages that may be taken.
    :param fresh: Whether this generation holds nothing yet.
    """
    # Alone, and past the limit: it was in a portion of 1 when its process died the last time.
    crashed = [m for m in messages if m.crashes > max_crashes + 1]
    rest = [m for m in messages if m.crashes <= max_crashes + 1]
    worst = max((m.crashes for m in rest), default=0)
    limit = portion_limit(worst, max_crashes)
    if limit is not None:
        if not fresh:
            return None if not crashed else Portion([], rest, crashed, False)
        room = min(room, limit)
    return Portion(rest[:room], rest[room:], crashed, limit is not None and bool(rest))


@dataclass(frozen=True, slots=True)
class Returned:
    """A bundle that was read."""

    header: Header
    messages: list[Held]


def examine(data: bytes, journal: Journal) -> Returned | None:
    """Read a returned bundle, less what needs no handling; ``None`` if nothing of it does.

    :raises BundleError: If it cannot be read, or what it refers to is missing.
    :raises StagingError: If the staging folder cannot be read now.
    """
    header, messages = bundles.unpack(data)
    done = journal.done(header.generation, None if header.released else header.bundle)
    if done is None:
        return None
    if header.staged is not None:
        messages = load_staged(header, journal)
    if done:
        messages = [message for message in messages if message.message_id not in done]
    return Returned(header, [message._replace(redelivered=True) for message in messages])


def load_staged(header: Header, journal: Journal) -> list[Held]:
    """The messages that a bundle of staged custody refers to.

    Who may publish can have written the header: only the file of that generation and bundle is
    read, and only if it has the size that was noted.

    :raises BundleError: If the file is missing or is not what was written.
    :raises StagingError: If the staging folder cannot be read now.
    """
    import hashlib

    staged = header.staged or {}
    name = staged_name(header.generation, header.bundle)
    if name is None or not str(staged["path"]).endswith(f"/{name}"):
        raise BundleError(
            f"a bundle refers to {staged['path']!r}, which is not the file of its generation and"
            " name: it is not read"
        )
    size = journal.size(name)
    if size is None:
        raise BundleError(f"the staged bundle {staged['path']} is missing")
    data = journal.get(name) if size == staged["bytes"] else b""
    if hashlib.sha256(data).hexdigest() != staged["sha256"]:
        raise BundleError(f"the staged bundle {staged['path']} is not what was written")
    messages = list(bundles.unpack_messages(data))
    if len(messages) != header.count:
        raise BundleError(f"the staged bundle {staged['path']} lacks messages")
    return messages


def staged_name(generation: str, bundle: str) -> str | None:
    """The file of a bundle of staged custody; ``None`` if it is none of our names."""
    return f"{digest(generation)}/{bundle}.bundle" if _NAME.fullmatch(bundle) else None


def store_staged(journal: Journal, generation: str) -> Callable[[str, bytes], dict[str, object]]:
    """What keeps the messages of staged custody."""
    import hashlib

    def store(name: str, data: bytes) -> dict[str, object]:
        path = journal.put(str(staged_name(generation, name)), data)
        return {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    return store


def rest_header(header: Header, name: str, count: int) -> Header:
    """The header of what is put back of a bundle."""
    return replace(header, bundle=name, count=count, released=True, staged=None)
