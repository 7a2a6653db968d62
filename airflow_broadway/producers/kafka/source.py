"""Receives for one generation, in the run's own thread; ``claiming`` claims what it reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.claiming import ClaimingSource
from airflow_broadway.producers.kafka.claims import Place
from airflow_broadway.producers.kafka.errors import Truncated
from airflow_broadway.producers.kafka.offsets import minus
from airflow_broadway.producers.kafka.opening import (
    expired_text,
    truncated_text,
)
from airflow_broadway.producers.kafka.reader import PartitionReader
from airflow_broadway.producers.kafka.records import Records
from airflow_broadway.producers.kafka.silence import Silence

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

log = logging.getLogger(__name__)

#: Seconds between two looks at whether the run is to stop.
_STOP_INTERVAL: Final = 0.2
#: Seconds for which a receive waits for more messages after its first.
_GATHER_TIMEOUT: Final = 0.02
#: Errors of the client on an offset that the log does not have.
_OUT_OF_RANGE: Final = ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")
#: Errors of the client on a connection, which it makes again by itself.
_CONNECTION: Final = ("_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE")


class KafkaSource(ClaimingSource):
    """Receives for one generation."""

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._received = 0
        self._stopped = self._closed = False
        #: Whether a backfill ended before its interval did.
        self._unread = False
        #: Ids of messages of which a copy may be in a retry topic too, that were handed out.
        self._seen: set[str] = set()
        self._records = Records(env.generation, by_key=producer.order == "key")
        super().__init__(producer, env)
        wait = producer.fetch_config.max_wait_time
        self._silence = Silence(self._cluster, env.clock, wait=wait)

    @property
    def lease(self) -> Lease:
        if not self._holds:  # what holds nothing cannot lapse
            self._deadline = self._now() + self._producer.lease
        read: dict[str, dict[str, Any]] = {}
        for (topic, partition), reader in list(self._readers.items()):
            if reader.claim is not None:
                read.setdefault(topic, {})[str(partition)] = reader.to_json()
        own: dict[str, list[int]] = {}
        for topic, partition in self._places:
            own.setdefault(topic, []).append(partition)
        expired = sum(self._expired.values())
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
                **({} if self._live else {"backfill": self._folder}),
                **({"unread": True} if self._unread else {}),
                **({"set_aside": {"expired": expired}} if expired else {}),
            },
        )

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
        """Whether more is wanted than was so far: a message is due, or another run has settled."""
        now = self._now()
        due = [
            r for r in self._readers.values() if r.look_again is not None and now >= r.look_again
        ]
        for reader in due:
            if reader.claim is not None:
                reader.go_on(now)
                self._assigned = False
        self._look([reader.place for reader in due if reader.claim is None])
        return any(not self._readers[reader.place].quiet for reader in due)

    def _assign(self) -> None:
        """Has the client read each partition where this source goes on."""
        if self._assigned:
            return
        wanted = {place: r.position for place, r in self._readers.items() if not r.finished}
        epochs = {place: self._readers[place].epoch for place in wanted}
        for place in wanted:
            self._readers[place].at_end = False
        self._cluster.assign(wanted, epochs)
        self._assigned = True

    def _fetch(self, demand: int, wait: float) -> list[Any]:
        """Fetches what comes within a while: messages, and events of partitions."""
        consume = self._cluster.consume
        # An interruption may take what was fetched with it: then it is fetched again.
        self._assigned = False
        records = consume(1, wait)
        if records and demand > 1:
            records += consume(demand - 1, 0.0)
            if len(records) < demand and any(not r.quiet for r in self._readers.values()):
                records += consume(demand - len(records), _GATHER_TIMEOUT)
        self._assigned = True
        return records

    def _accept(self, records: Sequence[Any]) -> list[Message]:
        """Claims what was fetched, and makes messages of it."""
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
        self._assigned = True
        messages = self._take(fetched) if fetched else []
        for place in gone:
            self._expire(self._readers[place])
        # The client reads no more of a partition that it could not read on.
        self._assigned = self._assigned and not gone
        return messages

    def _take(self, fetched: Mapping[Place, Sequence[Any]]) -> list[Message]:
        now = self._now()
        before = {place: (reader := self._readers[place], reader.position) for place in fetched}
        wanted: dict[Place, Sequence[Any]] = {}
        ends: dict[Place, int] = {}
        try:
            for place, records in fetched.items():
                reader = self._readers[place]
                wanted[place] = reader.wanted(records, now)
                for offset in reader.superseded(before[place][1], records):
                    log.error(
                        "%s-%d-%d was to be retried, and is gone (compacted, or removed by"
                        " retention): it counts as superseded, and comes no more",
                        *place,
                        offset,
                    )
                if wanted[place] and reader.position > reader.claimed:
                    ends[place] = reader.ahead(self._cluster.ends(place)[1])
            held = self._claim(ends) if ends else set()
        except BaseException:  # what was fetched is fetched again; re-raised
            self._assigned = False
            for reader, position in before.values():
                reader.position = position
            raise
        if ends:
            # Those that are another's, or have changed, are read again where they are now.
            wanted = {p: each for p, each in wanted.items() if p not in ends or p in held}
            self._assigned = len(held) == len(ends)
        messages: list[Message] = []
        for place, records in wanted.items():
            if records:
                made = self._messages(self._readers[place], records)
                self._readers[place].messages += len(made)
                self._received += len(made)
                messages += made
        for place in fetched:
            self._go_on(self._readers[place])
        return messages

    def _go_on(self, reader: PartitionReader) -> None:
        """Skips what is not wanted."""
        target = reader.skip_to()
        if reader.finished:
            self._cluster.leave([reader.place])
        elif target is not None and self._assigned:
            self._cluster.seek(reader.place, target)
            reader.position = target
            reader.at_end = False

    def _messages(self, reader: PartitionReader, records: Sequence[Any]) -> list[Message]:
        records = reader.take(records)
        marks = reader.marks(records)
        at = self._clock.now()
        if not reader.group:
            if marks is not None and self._seen:
                topic, partition = reader.place
                fresh = [f"{topic}-{partition}-{r.offset()}" not in self._seen for r in records]
                records = [each for each, keep in zip(records, fresh, strict=True) if keep]
                marks = [each for each, keep in zip(marks, fresh, strict=True) if keep]
            made = self._records.messages(*reader.place, records, marks, at, self._received)
            if self._producer.order == "none":
                self._seen.update(m.message_id for m in made if m.redelivered)
            return made
        # A settlement that died may have sent a copy twice.
        made = []
        for record, origin in reader.origins(records):
            if origin.message_id not in self._seen:
                self._seen.add(origin.message_id)
                attempt = reader.marks([record])
                made.append(
                    self._records.retried(
                        reader.place,
                        record,
                        origin,
                        attempt[0][0] if attempt else 1,
                        at,
                        self._received + len(made),
                    )
                )
        return made

    def _expire(self, reader: PartitionReader) -> None:
        """Goes on behind what retention has removed while this run read."""
        low, end = self._cluster.ends(reader.place)
        if low <= reader.position:
            raise Truncated(truncated_text(reader.place, reader.position, end))
        text, lost = expired_text(reader.place, minus(((reader.position, low),), reader.view.done))
        if lost and self._producer.on_expired == "fail":
            raise ProducerError(text)
        if lost:
            log.error("%s", text)
            self._expired[reader.place] = self._expired.get(reader.place, 0) + lost
        reader.position, reader.at_end = low, False

    def _event(self, record: Any, error: Any) -> None:
        """Takes in what the client says instead of a message."""
        code = error.code()
        if code == self._cluster.eof:
            reader = self._readers[record.topic(), record.partition()]
            reader.at_end, reader.end = True, record.offset()
            self._silence.heard(reader.place)
            return
        if error.retriable() or error.name() in _CONNECTION:
            log.warning("Kafka: %s", error.str())
            return
        raise self._cluster.error(error, "messages cannot be received")

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> Sequence[Message]:
        if self._stopped:
            return []
        self._stopped = True
        if self._assigned:
            for reader in self._readers.values():
                self._warn_of_open_transaction(reader)
            self._finish()
            # A broker that does not wait before it answers is asked no more.
            self._cluster.assign({})
        if not self._live:
            self._unread = not all(reader.quiet for reader in self._readers.values())
        if self._received:
            log.info(
                "Received %s of %s.",
                many(self._received, "message"),
                many(sum(bool(r.messages) for r in self._readers.values()), "partition"),
            )
        return []

    def _finish(self) -> None:
        """Claims the end of the log: behind its last message it may hold what nobody can read."""
        ends = {
            place: min(reader.end, reader.limit)
            for place, reader in self._readers.items()
            if reader.at_end and reader.position < min(reader.end, reader.limit)
        }
        if not ends:
            return
        with suppress(BroadwayError):  # the next run does it then
            for place in self._claim(ends):
                self._readers[place].position = ends[place]

    def _warn_of_open_transaction(self, reader: PartitionReader) -> None:
        """Warns if a run ends early because a transaction is open."""
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
            if self._wrote and not any(reader.claim for reader in self._readers.values()):
                self._generation.forget_soon()  # others were faster: there is nothing to settle
        finally:
            self._cluster.close()
