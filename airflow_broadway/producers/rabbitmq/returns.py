"""Bundles that came back, because their lease lapsed or was given up.

Who reads one first asks the journal of the generation that held it: what was settled or published
again is dropped, the rest is handled, marked as redelivered.  Messages whose process died again and
again come in ever smaller portions, each alone in its run, until one that still kills its process
is known by itself and set aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from airflow_broadway.core.errors import ProducerError, StagingError
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import Header, Held
from airflow_broadway.producers.rabbitmq.journal import Journal

__all__ = ["Portion", "examine", "load_staged", "portion_limit", "split"]

log = logging.getLogger(__name__)


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

    :raises BundleError: If this release cannot read it.
    :raises StagingError: If what it refers to is missing.
    """
    header, messages = bundles.unpack(data)
    if not header.released and journal.dropped(header.generation, header.bundle):
        return None
    if header.staged is not None:
        messages = load_staged(header, journal)
    done = journal.now(header.generation)
    if done:
        messages = [message for message in messages if message.message_id not in done]
    return Returned(header, [message._replace(redelivered=True) for message in messages])


def load_staged(header: Header, journal: Journal) -> list[Held]:
    """The messages that a bundle of staged custody refers to.

    :raises StagingError: If the file is missing or is not what was written.
    """
    import hashlib

    staged = header.staged or {}
    data = journal.get(str(staged.get("path", "")))
    if hashlib.sha256(data).hexdigest() != staged.get("sha256"):
        raise StagingError(f"the staged bundle {staged.get('path')} is not what was written")
    messages = list(bundles.unpack_messages(data))
    if len(messages) != header.count:
        raise StagingError(f"the staged bundle {staged.get('path')} lacks messages")
    return messages


def store_staged(journal: Journal, generation: str) -> Callable[[str, bytes], dict[str, object]]:
    """What keeps the messages of staged custody."""
    import hashlib

    from airflow_broadway.producers.rabbitmq.journal import digest

    def store(name: str, data: bytes) -> dict[str, object]:
        path = journal.put(f"{digest(generation)}/{name}.bundle", data)
        return {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    return store


def rest_header(header: Header, name: str, count: int) -> Header:
    """The header of what is put back of a bundle."""
    return replace(header, bundle=name, count=count, released=True, staged=None)


def unreadable(error: ProducerError | StagingError) -> None:
    """Tell of a bundle that stays where it is."""
    log.error(
        "A returned bundle stays in its queue: %s", error, extra={"code": "bundle_unreadable"}
    )
