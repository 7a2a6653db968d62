"""Tracks the reading of one partition: the wanted offsets, the position and the claim."""

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

#: Offsets that are claimed in advance: initially, and at most.
_AHEAD_FIRST, _AHEAD_MOST = 2_000, 100_000
#: The gap of unwanted offsets above which seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds between two checks of a partition that another run holds.
_LOOK_INTERVAL: Final = 10.0
#: Seconds without an expected response after which a partition counts as unreachable.
_SILENCE_TIMEOUT: Final = 20.0
#: The maximum number of seconds that one step adds to a silence: after a long callback a broker
#: still has time to respond.
_LONGEST_STEP: Final = 1.0


class PartitionReader:
    """One partition as a generation reads it.

    :param view: The state of the partition before it is read.
    """

    def __init__(
        self, place: Place, view: View, now: float, producer: KafkaOptions, env: ProducerEnv
    ) -> None:
        self.place = place
        self.view = view
        self._generation = env.generation
        self._order = producer.order
        #: Whether it belongs to a retry topic, and the group whose copies are read there.
        self.retries = place[0] in producer.retry_topics
        self._group = producer.group_id
        #: The half-open range of wanted timestamps, in milliseconds; ``None``: all.
        self._interval = env.interval and [round(at.timestamp() * 1000) for at in env.interval]
        self._ahead = 0 if self.retries else _AHEAD_FIRST
        #: The next offset to fetch.
        self.position = view.state.start
        #: Whether the end of the partition was reached after its last message, and its offset.
        self.at_end = False
        self.end = -1
        #: This generation's claim, as last written.
        self.claim: Claim | None = None
        #: The number of delivered messages, and the offsets skipped because they are not due.
        self.messages = 0
        self.left: Ranges = ()
        self._blocked: frozenset[str] = frozenset()
        self.epoch = view.state.epoch
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """Recomputes the wanted offsets: a delayed message may be due now.

        Skipped messages wait for a later run, and block later messages of their keys until then.
        """
        view = self.view
        failed = {
            o: message for o, message in view.state.failed.items() if message.not_before > now
        }
        #: Offsets of messages that are not due, and their key groups, which they block.
        self._waiting = frozenset(failed)
        blocked = frozenset(message.group for message in failed.values() if message.group)
        self._blocked = blocked | self._blocked if self.left else blocked
        #: The end of the wanted range, exclusive.
        self.limit = FOREVER if view.state.limit < 0 else view.state.limit
        #: The timestamp from which more may be wanted; ``None``: not in this run.
        self.look_again: float | None = None
        if view.held_until:
            self.limit, self.look_again = view.state.start, now + _LOOK_INTERVAL
        elif failed:
            self.look_again = min(message.not_before for message in failed.values())
            if self._order == "partition":
                self.limit = min(self.limit, *failed)

    @property
    def finished(self) -> bool:
        """Whether the position has reached the end of the wanted range."""
        return self.position >= self.limit

    @property
    def quiet(self) -> bool:
        """Whether there is currently nothing more to read."""
        return self.finished or self.at_end

    @property
    def claimed(self) -> int:
        """The end of the claimed range, exclusive; 0 without a claim."""
        return 0 if self.claim is None else self.claim.end

    # -- taking --------------------------------------------------------------------------------

    def wanted(self, records: Sequence[Any], now: float) -> Sequence[Any]:
        """Returns the records before :attr:`limit`, and advances the position past them.

        In a retry topic, reading stops at a record that is not due, or that this generation has
        published.
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
        """Returns offsets of messages to be retried that are no longer in the log.

        :param start: The offset from which the records were read.
        """
        failed = self.view.state.failed
        if not failed:
            return []
        present = {record.offset() for record in records}
        return [o for o in failed if start <= o < max(present) and o not in present]

    def ahead(self, log_end: int) -> int:
        """Returns the offset up to which to claim.

        It never exceeds the end of the log: messages sent later would be marked as redelivered.
        """
        start = self.claimed or self.view.state.start
        end = min(start + self._ahead, log_end, self.limit)
        self._ahead = min(2 * self._ahead, _AHEAD_MOST)
        return max(end, self.position)

    def take(self, records: Sequence[Any]) -> Sequence[Any]:
        """Returns the claimed records that are to be delivered to the pipeline.

        For a retry topic it returns copies, without those of other groups.
        """
        done = self.view.state.done
        if done:
            records = [record for record in records if not contains(done, record.offset())]
        if self._interval is not None:
            low, high = self._interval
            records = [record for record in records if low <= record.timestamp()[1] < high]
        if self._waiting or self._blocked:
            records = self._select_ready(records)
        if records:
            epoch = records[-1].leader_epoch()
            self.epoch = -1 if epoch is None else epoch
        if not self.retries:
            return records
        copies = (copy_of(record, self._group) for record in records)
        return [copy for copy in copies if copy is not None]

    def _select_ready(self, records: Sequence[Any]) -> list[Any]:
        """Skips records that are not due, and records whose key is blocked by one."""
        ready: list[Any] = []
        skipped: list[int] = []
        for record in records:
            key = record.key()
            blocked = key is not None and key_group(as_text(key)) in self._blocked
            if blocked or record.offset() in self._waiting:
                skipped.append(record.offset())
            else:
                ready.append(record)
        self.left = union(self.left, of_offsets(skipped))
        return ready

    def marks(self, records: Sequence[Any]) -> list[tuple[int, bool]] | None:
        """Returns the attempt and the redelivered flag of each record.

        :returns: ``None`` if all records are new.
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
        """Returns the next offset to seek to; ``None`` if reading on is cheaper."""
        following = self.position
        for low, high in self.view.state.done:
            if low <= following < high:
                following = high
        return following if following - self.position > _SEEK_GAP else None

    def to_json(self) -> list[Any]:
        """Serializes the progress under the claim: message count, range and skipped offsets."""
        assert self.claim is not None
        end = min(max(self.position, self.claim.start), self.claim.end)
        return [self.messages, self.claim.start, end, [list(span) for span in self.left]]


class Silence:
    """Measures for how long each partition has sent no response while it was read.

    :param wait: Seconds for which a broker may delay an empty fetch response.
    """

    def __init__(self, clock: Clock, *, wait: float) -> None:
        self._clock = clock
        self._limit = _SILENCE_TIMEOUT + wait
        self._seconds: dict[Place, float] = {}
        self._looked = clock.monotonic()

    def heard(self, place: Place) -> None:
        """Resets the silence of a partition after a message or end-of-partition event."""
        self._seconds.pop(place, None)

    def listened(self, places: Iterable[Place], *, all_heard: bool) -> None:
        """Adds the time since the last call to the silence of partitions.

        :param places: The partitions that are not at their end.
        :param all_heard: Whether the client's queue was drained: messages of one partition may be
            queued behind those of another.
        """
        now = self._clock.monotonic()
        step, self._looked = min(now - self._looked, _LONGEST_STEP), now
        if all_heard:
            self._seconds = {place: self._seconds.get(place, 0.0) + step for place in places}

    def overdue(self, places: Iterable[Place]) -> Place | None:
        """Returns the first partition whose silence exceeds the timeout; ``None``: none."""
        late = (place for place in places if self._seconds.get(place, 0.0) > self._limit)
        return next(late, None)
