"""Messages whose process died again and again: a generation takes ever fewer of them at a time.

It takes nothing beside them.  In the end one message is alone in its generation; if the process
dies once more, that message is to blame, and is set aside.
"""

from __future__ import annotations

from typing import NamedTuple

from airflow_broadway.producers.rabbitmq.bundle import Held

__all__ = ["Division", "divide", "portion_limit"]


class Division(NamedTuple):
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


def divide(messages: list[Held], *, room: int, fresh: bool, max_crashes: int) -> Division | None:
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
            return None if not crashed else Division([], rest, crashed, False)
        room = min(room, limit)
    return Division(rest[:room], rest[room:], crashed, limit is not None and bool(rest))
