"""One partition as a source reads it: what is wanted of it, how far it is read, what is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from airflow_broadway.producers.kafka.claims import Claim, Place
from airflow_broadway.producers.kafka.offsets import (
    FOREVER,
    Ranges,
    contains,
    of_offsets,
    union,
)
from airflow_broadway.producers.kafka.opening import View
from airflow_broadway.producers.kafka.options import key_group
from airflow_broadway.producers.kafka.records import Origin, as_text, origin_of

#: Offsets that are claimed ahead: the first time, and at most.
_AHEAD_FIRST, _AHEAD_MOST = 2_000, 100_000
#: A gap of unwanted offsets from which on seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds between two looks at a partition that another run holds.
_LOOK_INTERVAL: Final = 10.0


class PartitionReader:
    """One partition as a generation reads it.

    :param view: The partition as it was found.
    :param order: The producer's option.
    :param group: The consumer group, of a partition of a retry topic; else ``""``.
    :param interval: Milliseconds: the timestamps of the messages that are wanted, from the first to
        before the second; ``None``: all.
    """

    def __init__(
        self,
        place: Place,
        view: View,
        now: float,
        *,
        generation: str,
        order: str,
        group: str,
        interval: tuple[int, int] | None,
    ) -> None:
        self.place = place
        self.view = view
        self._generation = generation
        self._order = order
        self.group = group
        self._interval = interval
        self._ahead = 0 if group else _AHEAD_FIRST
        #: The next offset that Kafka is to hand out.
        self.position = view.base
        #: Whether the end of the partition was seen since its last message, and its offset.
        self.at_end = False
        self.end = -1
        #: Nothing from here on is wanted now.
        self.limit = FOREVER if view.limit < 0 else view.limit
        #: From when on something more may be wanted; ``None``: in this run no more.
        self.look_again: float | None = now + _LOOK_INTERVAL if view.held_until else None
        if view.held_until:
            self.limit = view.base
        #: This generation's claim, as last written.
        self.claim: Claim | None = None
        #: Messages that were handed out, and offsets that wait.
        self.messages = 0
        self.left: Ranges = ()
        self.epoch = -1 if view.claim is None else view.claim.epoch
        #: Messages that wait to be retried, and their groups by key: what is behind them waits too.
        self._waiting: frozenset[int] = frozenset()
        self._blocked: frozenset[str] = frozenset()
        self._refresh(now)

    def _refresh(self, now: float) -> None:
        failed = self.view.failed
        waiting = {offset: each for offset, each in failed.items() if each.not_before > now}
        self._waiting = frozenset(waiting)
        self._blocked = frozenset(each.group for each in waiting.values() if each.group)
        if not waiting or self.view.held_until:
            return
        self.look_again = min(each.not_before for each in waiting.values())
        if self._order == "partition":
            self.limit = min(self.limit, *waiting)

    @property
    def finished(self) -> bool:
        """Whether nothing more of it is wanted now."""
        return self.position >= self.limit

    @property
    def quiet(self) -> bool:
        """Whether nothing is to be had now."""
        return self.finished or self.at_end

    @property
    def claimed(self) -> int:
        """The offset behind the claimed range."""
        return 0 if self.claim is None else self.claim.end

    def go_on(self, now: float) -> None:
        """Goes on behind a message that need not wait any longer.

        What was left comes in a later run, and nothing of its key before it.
        """
        blocked = self._blocked if self.left else frozenset()
        self.limit = FOREVER if self.view.limit < 0 else self.view.limit
        self.look_again = None
        self._refresh(now)
        self._blocked |= blocked

    # -- taking --------------------------------------------------------------------------------

    def wanted(self, records: Sequence[Any], now: float) -> Sequence[Any]:
        """Returns the records that are not behind :attr:`limit`, and moves on behind them.

        In a retry topic a record that is not due stops the reading, or one that this generation has
        sent.
        """
        if self.group:
            for record in records:
                origin = origin_of(record, self.group)
                own = origin is not None and origin.generation == self._generation
                if origin is not None and (own or origin.not_before > now):
                    self.limit = record.offset()
                    self.look_again = None if own else origin.not_before
                    break
        start, last = self.position, records[-1].offset()
        self.position = self.limit if last >= self.limit else max(start, last + 1)
        if records[0].offset() >= start and last < self.limit:
            return records
        return [each for each in records if start <= each.offset() < self.limit]

    def superseded(self, start: int, records: Sequence[Any]) -> list[int]:
        """Returns offsets that wait to be retried, and that the log no longer has.

        :param start: The offset from which the records were read.
        """
        if not self.view.failed:
            return []
        there = {each.offset() for each in records}
        return [o for o in self.view.failed if start <= o < max(there) and o not in there]

    def ahead(self, log_end: int) -> int:
        """Returns the offset up to which to claim.

        Never beyond what may be read: what nobody has sent yet would come marked.
        """
        start = self.claimed or self.view.base
        end = min(start + self._ahead, log_end, self.limit)
        self._ahead = min(2 * self._ahead, _AHEAD_MOST)
        return max(end, self.position)

    def take(self, records: Sequence[Any]) -> Sequence[Any]:
        """Returns the records that are to be handed out, of those that are claimed."""
        view = self.view
        if view.done:
            records = [each for each in records if not contains(view.done, each.offset())]
        if self._interval is not None:
            low, high = self._interval
            records = [each for each in records if low <= each.timestamp()[1] < high]
        if self._waiting or self._blocked:
            records = self._ready(records)
        if records:
            epoch = records[-1].leader_epoch()
            self.epoch = -1 if epoch is None else epoch
        return records

    def _ready(self, records: Sequence[Any]) -> list[Any]:
        """Leaves what waits, and what has a key of which a message waits."""
        taken: list[Any] = []
        left: list[int] = []
        for each in records:
            key = each.key()
            blocked = key is not None and key_group(as_text(key)) in self._blocked
            if blocked or each.offset() in self._waiting:
                left.append(each.offset())
            else:
                taken.append(each)
        self.left = union(self.left, of_offsets(left))
        return taken

    def marks(self, records: Sequence[Any]) -> list[tuple[int, bool]] | None:
        """Returns the attempt of each record, and whether it is redelivered.

        :returns: ``None``: all are new.
        """
        failed, marked = self.view.failed, self.view.marked
        if not records or (not failed and records[0].offset() >= marked):
            return None
        made = []
        for each in records:
            offset = each.offset()
            attempts = failed[offset].attempts if offset in failed else 0
            made.append((attempts + 1, attempts > 0 or offset < marked))
        return made

    def origins(self, records: Sequence[Any]) -> list[tuple[Any, Origin]]:
        """Returns records of a retry topic with their origins, without those of other groups."""
        found = ((each, origin_of(each, self.group)) for each in records)
        return [(each, origin) for each, origin in found if origin is not None]

    def skip_to(self) -> int | None:
        """Returns where to go on reading, if far from here."""
        following = self.position
        for low, high in self.view.done:
            if low <= following < high:
                following = high
        return following if following - self.position > _SEEK_GAP else None

    def to_json(self) -> list[Any]:
        """Returns what was read under the claim: messages, range, and offsets that wait."""
        assert self.claim is not None
        end = min(max(self.position, self.claim.start), self.claim.end)
        return [self.messages, self.claim.start, end, [list(each) for each in self.left]]
