"""Messages whose process died again and again: a generation takes ever fewer of them at a time.

It takes nothing beside them.  In the end one message is alone in its generation; if the process
dies once more, that message is to blame, and is set aside.

Who settles a generation whose process died counts one death for each message that it held
(:class:`Deaths`), and who receives asks for them.  A broker that carries the count with each
message needs no such file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, TypeVar

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.open_here import is_open_here
from airflow_broadway.producers.kit.state_files import StateFiles

__all__ = [
    "FOLDER",
    "Deaths",
    "Division",
    "divide",
    "dying",
    "is_suspect",
    "portion_limit",
    "why_crashed",
]

_T = TypeVar("_T")

#: Where deaths are counted, among a queue's files.
FOLDER: Final = "deaths"
#: What stands there beside the deaths of a message: how many it had when its process had nothing
#: else the last time, and when it was done with; and that those of a generation are counted.
_ALONE, _DONE, _COUNTED = "alone ", "done ", "counted "


@dataclass(frozen=True)
class Division(Generic[_T]):
    """What becomes of messages that came back.

    :param take: Messages to secure now.
    :param later: Messages to put back.
    :param crashed: Messages to set aside, because each killed its process while it was alone.
    :param alone: Whether what is taken must be all that this generation holds.
    """

    take: list[_T]
    later: list[_T]
    crashed: list[_T]
    alone: bool


def portion_limit(crashes: int, max_crashes: int) -> int | None:
    """How many messages of so many crashes one generation may hold; ``None``: any number.

    The first crash is the machine's more often than the message's.  From the second on the portion
    shrinks tenfold with each, and is 1 for who crashed more than ``max_crashes`` times.
    """
    if crashes <= 1 and max_crashes >= 1:
        return None
    return int(10 ** min(9, max(0, max_crashes + 1 - crashes)))


def is_suspect(crashes: int, max_crashes: int) -> bool:
    """Whether a message of so many crashes is kept apart from others."""
    return crashes > 0 and portion_limit(crashes, max_crashes) is not None


def divide(
    messages: Sequence[_T],
    crashes: Callable[[_T], int],
    *,
    room: int,
    fresh: bool,
    max_crashes: int,
) -> Division[_T] | None:
    """Divide messages that came back; ``None`` if they must wait for a generation of their own.

    :param crashes: How often a message's process died.
    :param room: The most messages that may be taken.
    :param fresh: Whether this generation holds nothing yet.
    """
    # Alone, and past the limit: it was in a portion of 1 when its process died the last time.
    crashed = [each for each in messages if crashes(each) > max_crashes + 1]
    rest = [each for each in messages if crashes(each) <= max_crashes + 1]
    worst = max(map(crashes, rest), default=0)
    limit = portion_limit(worst, max_crashes)
    if limit is not None:
        if not fresh:
            return None if not crashed else Division([], rest, crashed, False)
        room = min(room, limit)
    return Division(rest[:room], rest[room:], crashed, limit is not None and bool(rest))


def why_crashed(crashes: int) -> str:
    """Why a message is set aside."""
    return f"crashed: its process died {crashes} times, at last with nothing else to handle"


def dying(
    generation: str, settlement: Settlement, held: Callable[[], Iterable[str]]
) -> Collection[str]:
    """Of what a generation holds, the messages that count a death when it is settled.

    All, if the process died that received: nobody else leaves no manifest.  With a manifest, those
    of batches that a process died of; none, if it is damaged.
    """
    if settlement.damaged:
        return []
    if settlement.expected is None and settlement.everything is None:
        return [] if is_open_here(generation) else list(held())
    return [each for each in held() if each in settlement.died] if settlement.died else []


class Deaths:
    """How many processes died of each message of a queue, over all runs.

    A count tells of one message only if that was alone.  So no message counts more deaths than
    those after which it is taken alone, unless its process had nothing else the last time.

    :param files: The queue's.
    :param kept_days: Days for which the broker may keep a message.
    """

    def __init__(self, files: StateFiles, kept_days: int) -> None:
        self._counts = Failures(files, kept_days, folder=FOLDER)

    def count(
        self, generation: str, ids: Collection[str], now: datetime, *, alone: bool = False
    ) -> None:
        """Count one more for each message: once for a generation, however often that is said.

        Who settles may be killed after it, and tried again as long as the broker is out of reach.

        :param alone: Whether it is all that the generation ever held.
        :raises StagingError: If that cannot be written.
        """
        if not ids:
            return
        counted = f"{_COUNTED}{generation}"
        before = self._counts.of([counted, *ids], now)
        if counted in before:
            return
        counts = {each: before.get(each, 0) + 1 for each in ids}
        more = {f"{_ALONE}{each}": count for each, count in counts.items()} if alone else {}
        # Said once more, lest that is forgotten sooner than the number that it is taken from.
        more |= self._counts.of([f"{_DONE}{each}" for each in ids], now)
        self._counts.note({counted: 0, **counts, **more}, now)

    def forget(self, ids: Collection[str], now: datetime) -> None:
        """Count no more what messages have until now: they are done with.

        One that is sent back under its old id begins anew.

        :raises StagingError: If that cannot be written.
        """
        known = self._counts.of(ids, now) if ids else {}
        self._counts.note({f"{_DONE}{each}": count for each, count in known.items()}, now)

    def of(self, ids: Iterable[str], now: datetime, max_crashes: int) -> dict[str, int]:
        """The deaths of those that have any, in the order given.

        :raises StagingError: If they cannot be read.
        """
        known = self._counts.of(ids, now)
        if not known:  # as nearly always
            return {}
        more = self._counts.of([f"{each}{key}" for key in known for each in (_ALONE, _DONE)], now)
        return _that_count(known, {**known, **more}, max_crashes)

    def everything(self, now: datetime, max_crashes: int) -> dict[str, int]:
        """The deaths of all messages that have any, and that are not known to be done with.

        :raises StagingError: If they cannot be read.
        """
        self._counts.merge(now)
        known = self._counts.everything()
        ids = [key for key in known if not key.startswith((_COUNTED, _ALONE, _DONE))]
        return _that_count(ids, known, max_crashes)


def _that_count(ids: Iterable[str], known: Mapping[str, int], max_crashes: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in ids:
        deaths = known.get(each, 0)
        count = deaths - known.get(f"{_DONE}{each}", 0)
        if known.get(f"{_ALONE}{each}") != deaths:
            count = min(count, max_crashes + 1)
        if count > 0:
            found[each] = count
    return found
