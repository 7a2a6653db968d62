"""One partition as a source reads it: what is wanted of it, how far it is read, what is claimed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.kafka.claims import Place
from airflow_broadway.producers.kafka.opening import View
from airflow_broadway.producers.kafka.options import KafkaOptions, key_group
from airflow_broadway.producers.kafka.records import as_text, copy_of
from airflow_broadway.producers.kafka.settling import (
    FOREVER,
    Claim,
    Ranges,
    contains,
    of_offsets,
    union,
)

#: Offsets that are claimed ahead: the first time, and at most.
_AHEAD_FIRST, _AHEAD_MOST = 2_000, 100_000
#: A gap of unwanted offsets from which on seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds between two looks at a partition that another run holds.
_LOOK_INTERVAL: Final = 10.0
#: Seconds without an answer, where one was due, after which a partition counts as out of reach.
_SILENCE_TIMEOUT: Final = 20.0
#: Seconds between two looks that count, at most: a broker that was away while messages were
#: handled has time to answer.
_LONGEST_STEP: Final = 1.0


class PartitionReader:
    """One partition as a generation reads it.

    :param view: The partition as it was found.
    """

    def __init__(
        self, place: Place, view: View, now: float, producer: KafkaOptions, env: ProducerEnv
    ) -> None:
        self.place = place
        self.view = view
        self._generation = env.generation
        self._order = producer.order
        #: Whether it is of a retry topic, and the group whose copies are read there.
        self.retries = place[0] in producer.retry_topics
        self._group = producer.group_id
        #: Milliseconds: the timestamps of the messages that are wanted, from the first to before
        #: the second; ``None``: all.
        self._interval = env.interval and [round(at.timestamp() * 1000) for at in env.interval]
        self._ahead = 0 if self.retries else _AHEAD_FIRST
        #: The next offset that Kafka is to hand out.
        self.position = view.state.start
        #: Whether the end of the partition was seen since its last message, and its offset.
        self.at_end = False
        self.end = -1
        #: This generation's claim, as last written.
        self.claim: Claim | None = None
        #: Messages that were handed out, and offsets that wait.
        self.messages = 0
        self.left: Ranges = ()
        self._blocked: frozenset[str] = frozenset()
        self.epoch = view.state.epoch
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """Finds what is wanted now: a message that waited may be due.

        What was left comes in a later run, and nothing of its key before it.
        """
        view = self.view
        failed = {
            o: message for o, message in view.state.failed.items() if message.not_before > now
        }
        #: Messages that wait to be retried, and their groups by key: what is behind them waits too.
        self._waiting = frozenset(failed)
        blocked = frozenset(message.group for message in failed.values() if message.group)
        self._blocked = blocked | self._blocked if self.left else blocked
        #: Nothing from here on is wanted now.
        self.limit = FOREVER if view.state.limit < 0 else view.state.limit
        #: From when on something more may be wanted; ``None``: in this run no more.
        self.look_again: float | None = None
        if view.held_until:
            self.limit, self.look_again = view.state.start, now + _LOOK_INTERVAL
        elif failed:
            self.look_again = min(message.not_before for message in failed.values())
            if self._order == "partition":
                self.limit = min(self.limit, *failed)

    @property
    def finished(self) -> bool:
        """Whether nothing more of it is wanted now."""
        return self.position >= self.limit

    @property
    def quiet(self) -> bool:
        """Whether it has no more messages now, or none that are wanted."""
        return self.finished or self.at_end

    @property
    def claimed(self) -> int:
        """The offset behind the claimed range."""
        return 0 if self.claim is None else self.claim.end

    # -- taking --------------------------------------------------------------------------------

    def wanted(self, records: Sequence[Any], now: float) -> Sequence[Any]:
        """Returns the records that are not behind :attr:`limit`, and moves on behind them.

        In a retry topic a record that is not due stops the reading, or one that this generation has
        sent.
        """
        if self.retries:
            for record in records:
                copy = copy_of(record, self._group)
                own = copy is not None and copy.generation == self._generation
                if copy is not None and (own or copy.not_before > now):
                    self.limit = record.offset()
                    self.look_again = None if own else copy.not_before
                    break
        start, last = self.position, records[-1].offset()
        self.position = self.limit if last >= self.limit else max(start, last + 1)
        if records[0].offset() >= start and last < self.limit:
            return records
        return [record for record in records if start <= record.offset() < self.limit]

    def superseded(self, start: int, records: Sequence[Any]) -> list[int]:
        """Returns offsets that wait to be retried, and that the log no longer has.

        :param start: The offset from which the records were read.
        """
        failed = self.view.state.failed
        if not failed:
            return []
        there = {record.offset() for record in records}
        return [o for o in failed if start <= o < max(there) and o not in there]

    def ahead(self, log_end: int) -> int:
        """Returns the offset up to which to claim.

        Never beyond what may be read: what is sent later would come marked.
        """
        start = self.claimed or self.view.state.start
        end = min(start + self._ahead, log_end, self.limit)
        self._ahead = min(2 * self._ahead, _AHEAD_MOST)
        return max(end, self.position)

    def take(self, records: Sequence[Any]) -> Sequence[Any]:
        """Returns the records that are to be handed out, of those that are claimed.

        Of a retry topic it returns copies, without those of other groups.
        """
        done = self.view.state.done
        if done:
            records = [record for record in records if not contains(done, record.offset())]
        if self._interval is not None:
            low, high = self._interval
            records = [record for record in records if low <= record.timestamp()[1] < high]
        if self._waiting or self._blocked:
            records = self._ready(records)
        if records:
            epoch = records[-1].leader_epoch()
            self.epoch = -1 if epoch is None else epoch
        if not self.retries:
            return records
        copies = (copy_of(record, self._group) for record in records)
        return [copy for copy in copies if copy is not None]

    def _ready(self, records: Sequence[Any]) -> list[Any]:
        """Leaves what waits, and what has a key of which a message waits."""
        ready: list[Any] = []
        left: list[int] = []
        for record in records:
            key = record.key()
            blocked = key is not None and key_group(as_text(key)) in self._blocked
            if blocked or record.offset() in self._waiting:
                left.append(record.offset())
            else:
                ready.append(record)
        self.left = union(self.left, of_offsets(left))
        return ready

    def marks(self, records: Sequence[Any]) -> list[tuple[int, bool]] | None:
        """Returns the attempt of each record, and whether it is redelivered.

        :returns: ``None``: all are new.
        """
        failed, marked = self.view.state.failed, self.view.state.marked
        if not records or (not failed and records[0].offset() >= marked):
            return None
        marks = []
        for record in records:
            offset = record.offset()
            attempts = failed[offset].attempts if offset in failed else 0
            marks.append((attempts + 1, attempts > 0 or offset < marked))
        return marks

    def skip_to(self) -> int | None:
        """Returns where to go on reading, if far from here."""
        following = self.position
        for low, high in self.view.state.done:
            if low <= following < high:
                following = high
        return following if following - self.position > _SEEK_GAP else None

    def to_json(self) -> list[Any]:
        """Returns what was read under the claim: messages, range, and offsets that wait."""
        assert self.claim is not None
        end = min(max(self.position, self.claim.start), self.claim.end)
        return [self.messages, self.claim.start, end, [list(span) for span in self.left]]


class Silence:
    """Measures for how long each partition has not answered, while it was listened to.

    :param wait: Seconds that a broker waits before it answers that nothing has come.
    """

    def __init__(self, clock: Clock, *, wait: float) -> None:
        self._clock = clock
        self._limit = _SILENCE_TIMEOUT + wait
        self._seconds: dict[Place, float] = {}
        self._looked = clock.monotonic()

    def heard(self, place: Place) -> None:
        """Records that a message of a partition has come, or its end."""
        self._seconds.pop(place, None)

    def listened(self, places: Iterable[Place], *, all_heard: bool) -> None:
        """Counts the time since the last look.

        :param places: Those that are not at their end.
        :param all_heard: Whether nothing that has been fetched was left behind: what a partition
            has to hand out may stand behind the messages of another.
        """
        now = self._clock.monotonic()
        step, self._looked = min(now - self._looked, _LONGEST_STEP), now
        if all_heard:
            self._seconds = {place: self._seconds.get(place, 0.0) + step for place in places}

    def overdue(self, places: Iterable[Place]) -> Place | None:
        """Returns the first partition that has not answered for too long; ``None``: none."""
        late = (place for place in places if self._seconds.get(place, 0.0) > self._limit)
        return next(late, None)
