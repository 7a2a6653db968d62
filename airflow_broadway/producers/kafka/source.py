"""The half that receives: in the run's own thread, for one generation.

Fetching is claiming: what was fetched is handed out once the partition's table says that this
generation holds it.  A partition whose order counts is one run's alone, and is claimed ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.backfill import BackfillOpening, folder_of, milliseconds
from airflow_broadway.producers.kafka.client import Cluster, Place
from airflow_broadway.producers.kafka.errors import Truncated
from airflow_broadway.producers.kafka.opening import (
    Opening,
    expired_text,
    missing_topics,
    own_places,
)
from airflow_broadway.producers.kafka.partition import PartitionReader
from airflow_broadway.producers.kafka.records import Records
from airflow_broadway.producers.kafka.register import Register, group_files
from airflow_broadway.producers.kafka.silence import Silence

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = ["KafkaSource"]

log = logging.getLogger(__name__)

#: Seconds between two looks at whether the run is to stop.
_STOP_INTERVAL: Final = 0.2
#: Seconds for which a receive waits for more messages after its first.
_GATHER_TIMEOUT: Final = 0.02
#: The part of a lease that is over when the source itself moves its deadline on.
_EXTEND_PART: Final = 0.25
#: What the client says of an offset that the log does not have.
_OUT_OF_RANGE: Final = ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")


class KafkaSource:
    """Receives for one generation."""

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._producer, self._env, self._clock = producer, env, env.clock
        self._received = 0
        self._stopped = self._closed = False
        #: Whether a backfill ended before its interval did.
        self._unread = False
        #: Whether what is fetched next follows what was fetched before.
        self._assigned = False
        self._cluster = Cluster(producer, env)
        wait = producer.fetch_config.max_wait_time
        self._silence = Silence(self._cluster, env.clock, wait=wait)
        try:
            self._open()
        except BaseException:  # a kill too; raised again
            self._cluster.close()
            raise

    def _open(self) -> None:
        producer, env = self._producer, self._env
        self._cluster_id, partitions = self._cluster.metadata()
        for text in missing_topics(producer, self._cluster, partitions):
            raise ProducerError(text)
        concurrency = 1 if env.alone else producer.concurrency
        self._places = own_places(partitions, env.index % concurrency, concurrency)
        files = group_files(env.staging, self._cluster_id, producer.group_id)
        #: Where the tables of a backfill are; empty in a live run.
        self._backfill = "" if env.interval is None else folder_of(str(env.owner.get("run_id")))
        self._register = Register(files, env.clock, self._backfill or "tables")
        self._register.forget()
        opening = self._opening(partitions)
        opening.open()
        #: Messages that are received no more, and why.
        self._aside = {"expired": opening.expired} if opening.expired else {}
        self._generation = self._register.generation(env.generation)
        #: Until when this generation holds what it holds, as far as it knows.
        self._deadline = self._now() + producer.lease
        self._holds = False
        self._records = Records(env.generation, by_key=producer.order == "key")
        self._readers: dict[Place, PartitionReader] = {
            place: PartitionReader(
                place,
                self._register,
                env.generation,
                order=producer.order,
                interval=None if env.interval is None else milliseconds(env.interval),
                until=self._hold,
            )
            for place in self._places
        }
        now = self._now()
        for reader in self._readers.values():
            reader.look(now)

    def _opening(self, partitions: Mapping[str, Sequence[int]]) -> Opening | BackfillOpening:
        about = self._producer, self._cluster, self._register, self._clock
        if self._env.interval is not None:
            return BackfillOpening(*about, self._places, self._env.interval)
        return Opening(*about, partitions, self._places)

    @property
    def lease(self) -> Lease:
        if not self._holds:  # what holds nothing cannot lapse
            self._deadline = self._now() + self._producer.lease
        read: dict[str, dict[str, Any]] = {}
        for (topic, partition), reader in list(self._readers.items()):
            if reader.claimed or reader.read:
                read.setdefault(topic, {})[str(partition)] = reader.to_json()
        own: dict[str, list[int]] = {}
        for topic, partition in self._places:
            own.setdefault(topic, []).append(partition)
        return Lease(
            kind=self._producer.kind,
            generation=self._env.generation,
            seconds=self._producer.lease,
            deadline=datetime.fromtimestamp(self._deadline, timezone.utc),
            owner=dict(self._env.owner),
            state={
                "queue": self._producer.place,
                "cluster": self._cluster_id,
                "own": own,
                "read": read,
                "stopped": self._stopped,
                **({"backfill": self._backfill} if self._backfill else {}),
                **({"unread": True} if self._unread else {}),
                **({"set_aside": dict(self._aside)} if self._aside else {}),
            },
        )

    def _now(self) -> float:
        return self._clock.now().timestamp()

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if demand < 1 or self._stopped:
            return []
        self._check_held()
        monotonic = self._clock.monotonic
        end = monotonic() + timeout
        while not self._env.stopping():
            quiet = all(reader.quiet for reader in self._readers.values())
            if quiet and self._looked_again():
                continue
            left = max(0.0, end - monotonic()) if quiet else _STOP_INTERVAL
            busy = {place: r.position for place, r in self._readers.items() if not r.quiet}
            self._silence.check(busy)
            self._assign()
            records = self._fetch(demand, min(_STOP_INTERVAL, left))
            self._silence.listened(busy, all_heard=len(records) < demand)
            messages = self._accept(records)
            if messages:
                return messages
            if quiet and not records and left <= 0:
                break
        return []

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def _looked_again(self) -> bool:
        """Whether there is more to be had than was wanted so far."""
        now, found = self._now(), False
        for reader in self._readers.values():
            if reader.look_again is not None and now >= reader.look_again:
                self._register.read(reader.place)
                before = reader.position
                reader.position = 0
                reader.look(now)
                if reader.finished:
                    reader.position = before
                elif reader.position < before or not reader.at_end:
                    self._assigned, found = False, True
                else:
                    reader.position = before
        return found

    def _assign(self) -> None:
        """Have the client read each partition where this source goes on."""
        if self._assigned:
            return
        wanted = {place: r.position for place, r in self._readers.items() if not r.finished}
        epochs = {place: self._readers[place].epoch for place in wanted}
        for place in wanted:
            self._readers[place].at_end = False
        self._cluster.assign(wanted, epochs)
        self._assigned = True

    def _fetch(self, demand: int, wait: float) -> list[Any]:
        """What comes within a while: messages, and what the client says of partitions."""
        consume = self._cluster.consume
        # Whatever interrupts this may take what was fetched with it: then it is fetched anew.
        self._assigned = False
        records = consume(1, wait)
        if records and demand > 1:
            records += consume(demand - 1, 0.0)
            if len(records) < demand and any(not r.quiet for r in self._readers.values()):
                records += consume(demand - len(records), _GATHER_TIMEOUT)
        self._assigned = True
        return records

    def _accept(self, records: Sequence[Any]) -> list[Message]:
        """Claim what was fetched, and make messages of it."""
        if not records:
            return []
        self._assigned = False
        fetched: dict[Place, list[Any]] = {}
        gone: list[Place] = []
        last: tuple[str, int] | None = None
        portion: list[Any] = []
        for record in records:
            error = record.error()
            if error is not None:
                if error.name() in _OUT_OF_RANGE:
                    gone.append((record.topic(), record.partition()))
                else:
                    self._event(record, error)
                continue
            place = record.topic(), record.partition()
            if place != last:
                portion, last = fetched.setdefault(place, []), place
                self._silence.heard(place)
            portion.append(record)
            self._readers[place].at_end = False
        messages: list[Message] = []
        at = self._clock.now()
        for place, portion in fetched.items():
            made = self._take(place, portion, at)
            self._received += len(made)
            messages += made
        for place in gone:
            self._expire(self._readers[place])
        # The client reads no more of a partition that it could not read on.
        self._assigned = not gone
        return messages

    def _expire(self, reader: PartitionReader) -> None:
        """Go on behind what retention has removed while this run read."""
        low, end = self._cluster.ends(reader.place)
        if low <= reader.position:
            raise Truncated(
                f"offset {reader.position} of {reader.place[0]}-{reader.place[1]} is beyond the end"
                f" {end}: the topic was made anew, or lost its tail; begin_offset='reset' once"
                " starts over"
            )
        text, lost = expired_text(reader.place, reader.gone(low))
        if lost and self._producer.on_expired == "fail":
            raise ProducerError(text)
        if lost:
            log.error("%s", text)
            self._aside["expired"] = self._aside.get("expired", 0) + lost
        reader.expire(low)

    def _take(self, place: Place, records: list[Any], at: datetime) -> list[Message]:
        reader = self._readers[place]
        if reader.finished:
            return []
        if records[0].offset() < reader.position:  # fetched before it was told where to go on
            records = [each for each in records if each.offset() >= reader.position]
            if not records:
                return []
        before = reader.claimed
        taken, marks = reader.take(records, lambda: self._cluster.ends(place)[1], at.timestamp())
        if reader.claimed != before and self._generation.ended():
            # Somebody ended this generation while it claimed.
            reader.take_back(reader.claimed)
            raise self._lapsed()
        self._go_on(reader)
        if not taken:
            return []
        return self._records.messages(*place, taken, marks, at, self._received)

    def _go_on(self, reader: PartitionReader) -> None:
        """Skip what is not wanted."""
        target = reader.seek_to()
        if reader.finished:
            self._cluster.leave([reader.place])
        elif target is not None:
            self._cluster.seek(reader.place, target)
            reader.position = target
            reader.at_end = False

    def _event(self, record: Any, error: Any) -> None:
        """What the client says instead of a message."""
        code = error.code()
        if code == self._cluster.eof:
            reader = self._readers[record.topic(), record.partition()]
            reader.at_end, reader.end = True, record.offset()
            self._silence.heard(reader.place)
            return
        if error.retriable() or error.name() in ("_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE"):
            log.warning("Kafka: %s", error.str())
            return
        raise self._cluster.error(error, "messages cannot be received")

    # -- the lease -----------------------------------------------------------------------------

    def _hold(self) -> float:
        """Write down until when this generation holds; called before each claim."""
        now = self._now()
        if not self._holds or self._deadline - now < (1 - _EXTEND_PART) * self._producer.lease:
            deadline = now + self._producer.lease
            self._generation.hold(deadline, self._env.owner)
            self._deadline, self._holds = deadline, True
        return self._deadline

    def _check_held(self) -> None:
        """Go on only while the lease lasts.

        :raises LeaseLapsed: If it has ended.
        """
        if self._generation.ended():
            raise self._lapsed()
        if not self._holds:
            return
        if self._now() >= self._deadline:
            renewed = self._generation.deadline()
            if renewed is None or self._now() >= renewed:
                raise LeaseLapsed(
                    f"the lease of generation {self._env.generation} was over before it was"
                    " renewed: others may have its messages"
                )
            self._deadline = renewed
        self._hold()

    def _lapsed(self) -> LeaseLapsed:
        return LeaseLapsed(
            f"generation {self._env.generation} was settled while it still received: a newer"
            " execution of its task, or a sweep, gave its messages back"
        )

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> Sequence[Message]:
        if self._stopped:
            return []
        self._stopped = True
        if self._assigned:
            for reader in self._readers.values():
                self._tell_of_open_transaction(reader)
                reader.finish()
            # A broker that does not wait before it answers is asked no more.
            self._cluster.assign({})
        if self._backfill:
            self._unread = not all(reader.quiet for reader in self._readers.values())
        if self._received:
            log.info(
                "Received %s of %s.",
                many(self._received, "message"),
                many(sum(bool(r.messages) for r in self._readers.values()), "partition"),
            )
        return []

    def _tell_of_open_transaction(self, reader: PartitionReader) -> None:
        """Say so if a run ends early because somebody has not ended his transaction."""
        behind = self._cluster.known_end(reader.place) - reader.end
        if not reader.at_end or behind <= 0 or self._env.stopping():
            return
        with suppress(BroadwayError):  # it ends without a word then
            if self._cluster.ends(reader.place)[1] > reader.end:
                return  # they may be read: they came as the run ended
            log.warning(
                "%s of %s-%d may not be read yet: they are behind a transaction that is still open,"
                " at %d.",
                many(behind, "offset"),
                *reader.place,
                reader.end,
            )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
            if self._holds and not any(reader.claimed for reader in self._readers.values()):
                self._generation.forget_soon()  # others were faster: there is nothing to settle
        finally:
            self._cluster.close()
