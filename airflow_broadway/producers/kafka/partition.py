"""One partition as a source reads it: what is wanted, where it is, what it holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.producers.kafka.client import Place
from airflow_broadway.producers.kafka.options import key_group
from airflow_broadway.producers.kafka.ranges import (
    Ranges,
    contains,
    count,
    intersection,
    minus,
    of_offsets,
    union,
)
from airflow_broadway.producers.kafka.records import as_text
from airflow_broadway.producers.kafka.register import Register
from airflow_broadway.producers.kafka.table import Table, claim, free, skip, unclaim

__all__ = ["PartitionReader"]

log = logging.getLogger(__name__)

#: Offsets that are claimed ahead where a partition is one run's alone: the first time, and at most.
_AHEAD_FIRST, _AHEAD_MOST = 2_000, 100_000
#: A gap of unwanted offsets from which on seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Pieces among what is finished from which on nothing new is taken: the table would grow for ever.
_MOST_HOLES: Final = 10_000
#: Seconds between two looks at a partition that another run holds.
_LOOK_INTERVAL: Final = 10.0


class PartitionReader:
    """One partition as a generation reads it.

    :param interval: The instants of the messages that are wanted, in milliseconds: from the first
        to before the second; ``None``: all.
    :param until: Writes the generation's lease down, and says until when it lasts: asked before
        each claim.
    """

    def __init__(
        self,
        place: Place,
        register: Register,
        generation: str,
        *,
        order: str,
        interval: tuple[int, int] | None,
        until: Callable[[], float],
    ) -> None:
        self.place = place
        self._register = register
        self._generation = generation
        self._order = order
        self._interval = interval
        self._until = until
        self._ahead = _AHEAD_FIRST
        table = register.known(place)
        assert table is not None
        self._mirrored = table.base
        #: What was to be read when the run began, in order.
        self._wanted: Ranges = ()
        #: The groups, by key, of which something is not ready: what is behind it waits.
        self._blocked: set[str] = set()
        #: The next offset that Kafka is to hand out.
        self.position = table.base
        #: Whether the end of the partition was seen since its last message.
        self.at_end = False
        #: The offset at its end, where that was seen.
        self.end = -1
        #: Whether nothing more of it is wanted in this run.
        self.finished = False
        #: What this generation has handed out, gaps of the log included, and how many messages.
        self.read: Ranges = ()
        self.messages = 0
        self._claimed: Ranges = ()
        self.epoch = table.epoch
        #: From when on something more may be wanted; ``None``: in this run no more.
        self.look_again: float | None = None

    def look(self, now: float) -> None:
        """See what is wanted now."""
        table = self._register.known(self.place)
        assert table is not None
        self._wanted = free(table, self._generation, now, order=self._order)
        waiting = [each.not_before for each in table.held.values() if each.not_before > now]
        if table.claims.keys() - {self._generation}:
            waiting.append(now + _LOOK_INTERVAL)
        self.look_again = min(waiting, default=None)
        if len(table.done) > _MOST_HOLES:
            log.error(
                "%s-%d has %d holes, of messages that are to be tried again: nothing new is taken"
                " of it until they are fewer",
                *self.place,
                len(table.done),
            )
            self._wanted = intersection(self._wanted, ((0, table.done[-1][1]),))
        if self._order == "key":
            self._blocked = {
                held.group for held in table.held.values() if held.not_before > now and held.group
            }
        start = self.next_wanted(self.position)
        self.finished = start is None
        if start is not None:
            self.position = start

    def next_wanted(self, offset: int) -> int | None:
        """The first offset from ``offset`` on that is wanted; ``None`` if there is none."""
        for low, high in self._wanted:
            if offset < high:
                return max(low, offset)
        return None

    @property
    def quiet(self) -> bool:
        """Whether nothing is to be had now."""
        return self.finished or self.at_end

    def seek_to(self) -> int | None:
        """Where to go on reading, if not right here; ends the reader where nothing is wanted."""
        following = self.next_wanted(self.position)
        if following is None:
            self.finished = True
            return None
        return following if following - self.position > _SEEK_GAP else None

    # -- taking --------------------------------------------------------------------------------

    def take(
        self, records: Sequence[Any], log_end: Callable[[], int], now: float
    ) -> tuple[Sequence[Any], list[tuple[int, bool]] | None]:
        """Claim what was fetched; the records that this generation holds now, with their marks.

        :param records: In order; none is before :attr:`position`.
        :param log_end: Asks where what may be read of the log ends.
        :returns: The records, and the attempt of each and whether it is redelivered; ``None``: all
            are new.
        """
        first, last = self.position, records[-1].offset() + 1
        self.position = last
        wanted = intersection(self._wanted, ((first, last),))
        if not wanted:
            return (), None
        held = intersection(wanted, self._claimed)
        if held != wanted:
            self._claim(wanted, first, last, log_end, now)
            held = intersection(wanted, self._claimed)
        if not held:
            # Another run has the partition, or was faster.
            self.finished = self._order != "none"
            return (), None
        known = self._register.known(self.place)
        if known is not None and known.held:
            self._tell_superseded(held, {each.offset() for each in records})
        if held == ((first, last),):
            taken = records
        else:
            taken = [each for each in records if contains(held, each.offset())]
        if self._interval is not None:
            low, high = self._interval
            taken = [each for each in taken if low <= each.timestamp()[1] < high]
        if self._order == "key":
            taken, held = self._ready(taken, held)
        self.read = union(self.read, held)
        self.messages += len(taken)
        if taken:
            self.epoch = self._epoch(taken[-1])
        return taken, self._marks(taken)

    def _tell_superseded(self, ranges: Ranges, there: Collection[int]) -> None:
        """Log what was to be tried again, and is not in the log any more."""
        table = self._register.known(self.place)
        assert table is not None
        for offset in table.held:
            if contains(ranges, offset) and offset not in there:
                log.error(
                    "%s-%d-%d was to be tried again, and is gone (compacted, or removed by"
                    " retention): it counts as superseded, and comes no more",
                    *self.place,
                    offset,
                )

    def _ready(self, records: Sequence[Any], held: Ranges) -> tuple[Sequence[Any], Ranges]:
        """What waits for no message of its key."""
        if not self._blocked:
            return records, held
        blocked = self._blocked
        taken: list[Any] = []
        left: list[Any] = []
        for each in records:
            key = each.key()
            waits = key is not None and key_group(as_text(key)) in blocked
            (left if waits else taken).append(each)
        return taken, minus(held, of_offsets(each.offset() for each in left))

    def _marks(self, records: Sequence[Any]) -> list[tuple[int, bool]] | None:
        table = self._register.known(self.place)
        assert table is not None
        held, marks = table.held, table.marks
        if not records or (not held and not marks):
            return None
        if not held and records[0].offset() >= marks[-1][1]:
            return None
        made = []
        for each in records:
            offset = each.offset()
            failed = held.get(offset)
            if failed is not None:
                made.append((failed.attempts + 1, True))
            else:
                made.append((1, contains(marks, offset)))
        return made

    @staticmethod
    def _epoch(record: Any) -> int:
        epoch = record.leader_epoch()
        return -1 if epoch is None else epoch

    # -- claiming ------------------------------------------------------------------------------

    def _claim(
        self, wanted: Ranges, first: int, last: int, log_end: Callable[[], int], now: float
    ) -> None:
        if self._order != "none":
            # Never beyond what may be read: what nobody has sent yet would come marked, and what
            # is behind an open transaction would seem to be gone.
            ahead = max(last, min(first + self._ahead, log_end()))
            wanted = intersection(self._wanted, ((first, ahead),))
            self._ahead = min(2 * self._ahead, _AHEAD_MOST)
        until = self._until()

        def claimed(table: Table | None) -> tuple[Table, Ranges]:
            assert table is not None
            made, given = claim(
                table, self._generation, wanted, now, until=until, order=self._order
            )
            if given:
                made = replace(made, mirrored=self._mirrored, epoch=self.epoch)
            return made, given

        given = self._register.change(self.place, claimed)
        self._claimed = union(self._claimed, given)

    def take_back(self, ranges: Ranges) -> None:
        """Give up what was claimed and handed out to nobody."""

        def without(table: Table | None) -> tuple[Table, None]:
            assert table is not None
            return unclaim(table, self._generation, ranges), None

        self._register.change(self.place, without)
        self._claimed = minus(self._claimed, ranges)

    def gone(self, low: int) -> Ranges:
        """What of the log's part before ``low`` was to be read, and is gone."""
        return intersection(self._wanted, ((self.position, low),))

    def expire(self, low: int) -> None:
        """Finish what the log no longer has, and go on at ``low``."""
        self._without_messages(self.gone(low))
        start = self.next_wanted(low)
        self.finished = start is None
        self.position = low if start is None else start
        self.at_end = False

    @property
    def claimed(self) -> Ranges:
        """What this generation has claimed here."""
        return self._claimed

    def finish(self) -> None:
        """Take in the end of the log: behind the last message it may hold what nobody can read."""
        if not self.at_end or self.end <= self.position:
            return
        self._without_messages(intersection(self._wanted, ((self.position, self.end),)))
        self.position = self.end

    def _without_messages(self, ranges: Ranges) -> None:
        """Finish what is known to hold no message; in a claim, when that is settled."""
        self._tell_superseded(ranges, set())
        own = intersection(ranges, self._claimed)
        self.read = union(self.read, own)
        rest = minus(ranges, own)
        if not count(rest):
            return

        def skipped(table: Table | None) -> tuple[Table, None]:
            assert table is not None
            return skip(table, rest), None

        self._register.change(self.place, skipped)

    def to_json(self) -> list[Any]:
        """How many messages were handed out, and of which offsets."""
        return [self.messages, [list(each) for each in self.read]]
