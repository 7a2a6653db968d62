"""The half that receives: in the run's own thread, for one generation.

A partition is claimed before its first message is handed out: a version of its claim is created in
staging, and the group's offset is committed once more, with a mark.  So a group that has members or
may not be written refuses the run before any callback, and another staging folder sees the claim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.findings import enforce
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.backfill import BackfillOpening, folder_of, milliseconds
from airflow_broadway.producers.kafka.claims import Claim, Claims, Place, group_files
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.errors import Truncated
from airflow_broadway.producers.kafka.offsets import minus
from airflow_broadway.producers.kafka.opening import (
    Opening,
    View,
    commit_of,
    expired_text,
    own_places,
    read_mark,
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
#: The part of a lease that is over when the source itself moves its deadline on.
_EXTEND_PART: Final = 0.25
#: Errors of the client on an offset that the log does not have.
_OUT_OF_RANGE: Final = ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")
#: Errors of the client on a connection, which it makes again by itself.
_CONNECTION: Final = ("_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE")


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
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            self._cluster.close()
            raise

    def _open(self) -> None:
        producer, env = self._producer, self._env
        self._cluster_id, partitions = self._cluster.metadata()
        files = group_files(env.staging, self._cluster_id, producer.group_id)
        self._live = env.interval is None
        self._folder = "claims" if self._live else folder_of(str(env.owner.get("run_id")))
        self._claims = Claims(files, env.clock, self._folder)
        self._claims.forget()
        self._retry_topics = {producer.retry_of(topic) for topic in producer.topics}
        if not self._live:  # a retry topic has copies of what is in the log
            partitions = {t: p for t, p in partitions.items() if t not in self._retry_topics}
        self._opening: Opening | BackfillOpening = (
            Opening(producer, self._cluster, self._claims, env.clock, partitions)
            if env.interval is None
            else BackfillOpening(producer, self._cluster, self._claims, env.clock, env.interval)
        )
        enforce(self._opening.check(), log)
        concurrency = 1 if env.alone else producer.concurrency
        self._places = own_places(partitions, env.index % concurrency, concurrency)
        self._generation = self._claims.generation(env.generation)
        #: The end of this generation's lease, as far as it knows.
        self._deadline = self._now() + producer.lease
        self._holds = self._wrote = False
        self._records = Records(env.generation, by_key=producer.order == "key")
        #: Ids of messages of which a copy may be in a retry topic too, that were handed out.
        self._seen: set[str] = set()
        self._readers: dict[Place, PartitionReader] = {}
        #: Messages that retention had removed when the run began, and while it read.
        self._expired: dict[Place, int] = {}
        views = self._look(self._places)
        self._begin({place: view for place, view in views.items() if view.begins})

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

    def _now(self) -> float:
        return self._clock.now().timestamp()

    # -- partitions ----------------------------------------------------------------------------

    def _look(self, places: Sequence[Place], *, anew: bool = True) -> dict[Place, View]:
        """Finds partitions as they are now, and begins to read them there.

        :param anew: Whether to do so where nothing has changed.
        :raises ProducerError: If the run is refused.
        """
        if not places:
            return {}
        views = self._opening.look(places)
        findings, self._opening.findings = self._opening.findings, []
        losses = self._opening.losses
        for text in [each.text for each in findings if each.text in losses]:
            log.error("%s", text)
        enforce([each for each in findings if each.text not in losses], log)
        interval = self._env.interval
        for place, view in views.items():
            known = self._readers.get(place)
            seen = None if known is None else (known.view.base, known.view.claim)
            if not anew and seen == (view.base, view.claim) and not view.held_until:
                continue
            self._readers[place] = PartitionReader(
                place,
                view,
                self._now(),
                generation=self._env.generation,
                order=self._producer.order,
                group=self._producer.group_id if place[0] in self._retry_topics else "",
                interval=None if interval is None else milliseconds(interval),
            )
            self._assigned = False
            if view.expired:
                self._expired[place] = view.expired
        return views

    def _begin(self, views: Mapping[Place, View]) -> None:
        """Commits where the group begins in partitions of which it has no offset."""
        free = {place: view for place, view in views.items() if not view.held_until}
        if not free or not self._live:
            return
        # Nobody knows of the generation yet: should it die now, others wait for the grace alone.
        claimed = self._create({place: view.base for place, view in free.items()}, self._now())
        self._committed(claimed)
        for place in claimed:
            self._release(place)
            reader = self._readers[place]
            reader.view = reader.view._replace(claim=self._claims.known(place))

    def _claim(self, ends: Mapping[Place, int]) -> set[Place]:
        """Claims partitions up to some offsets.

        :returns: Those that this generation holds now; others have changed, or are another's.
        :raises LeaseLapsed: If the generation was ended meanwhile.
        """
        fresh = [place for place in ends if self._readers[place].claim is None]
        before = {place: self._readers[place] for place in fresh}
        if fresh and self._live:
            found = self._cluster.committed(fresh)
            seen = {place: self._readers[place].view.committed for place in fresh}
            changed = [place for place in fresh if found.get(place) != seen[place]]
            self._look(changed, anew=False)
        same = {p for p in ends if p not in before or self._readers[p] is before[p]}
        claimed = self._create({place: ends[place] for place in same}, self._hold())
        if any(place not in claimed and place not in before for place in ends):
            raise self._overdue()
        if self._generation.ended():
            for place in claimed:
                self._release(place, claimed[place])
            raise self._lapsed()
        if self._live:
            self._committed(claimed)
            # Another staging folder may have claimed in the same moment: the last commit counts.
            found = self._cluster.committed([p for p in fresh if p in claimed])
            for place, each in found.items():
                mark = read_mark(each.metadata)
                if mark is not None and mark.owner != self._opening.owner:
                    self._release(place)
                    del claimed[place]
        for place in ends.keys() - claimed.keys():
            if self._readers[place] is before.get(place):
                self._look([place])
        return set(claimed)

    def _create(self, ends: Mapping[Place, int], until: float) -> dict[Place, Claim | None]:
        """Creates the next versions of claims.

        :returns: The claims before, by partition.
        """
        made: dict[Place, Claim | None] = {}
        for place, end in ends.items():
            reader = self._readers[place]
            view, own = reader.view, reader.claim

            def claimed(
                known: Claim | None,
                view: View = view,
                own: Claim | None = own,
                end: int = end,
                epoch: int = reader.epoch,
            ) -> Claim | None:
                if own is not None:
                    return replace(own, end=end, epoch=epoch) if known == own else None
                if known != view.claim:
                    return None
                return Claim(
                    start=view.base,
                    generation=self._env.generation,
                    end=end,
                    until=until,
                    marked=view.marked,
                    done=minus(view.done, ((0, view.base),)),
                    failed=view.failed,
                    settled=() if view.claim is None else view.settled,
                    topic_id=view.topic_id,
                    epoch=epoch,
                    limit=view.limit,
                )

            claim = self._claims.change(place, claimed, fresh=False)
            if claim is not None:
                made[place], reader.claim = own, claim
        return made

    def _committed(self, places: Mapping[Place, Claim | None]) -> None:
        """Commits the offset of claimed partitions once more, with a mark.

        :raises ProducerError: If the cluster refuses; the claims are given up.
        """
        owner, durable = self._opening.owner, self._claims.durable
        offsets = {
            place: commit_of(claim, owner, durable=durable)
            for place in places
            if (claim := self._readers[place].claim) is not None
        }
        try:
            self._cluster.commit(offsets)
        except BroadwayError:
            for place, before in places.items():
                self._release(place, before)
            raise
        for place, each in offsets.items():
            reader = self._readers[place]
            reader.view = reader.view._replace(committed=each)

    def _release(self, place: Place, before: Claim | None = None) -> None:
        """Gives up a claim of which nothing was handed out.

        :param before: The claim that it extended.
        """
        reader = self._readers[place]
        assert reader.claim is not None
        free = replace(reader.claim, generation="", end=0, until=0.0)
        self._claims.end(place, self._env.generation, before or free)
        reader.claim = before

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
        for place, records in fetched.items():
            reader = self._readers[place]
            wanted[place] = reader.wanted(records, now)
            for offset in reader.superseded(before[place][1], records):
                log.error(
                    "%s-%d-%d was to be retried, and is gone (compacted, or removed by retention):"
                    " it counts as superseded, and comes no more",
                    *place,
                    offset,
                )
            if wanted[place] and reader.position > reader.claimed:
                ends[place] = reader.ahead(self._cluster.ends(place)[1])
        if ends:
            self._assigned = False
            try:
                held = self._claim(ends)
            except BaseException:  # what was fetched is fetched again; re-raised
                for reader, position in before.values():
                    reader.position = position
                raise
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

    # -- the lease -----------------------------------------------------------------------------

    def _hold(self) -> float:
        """Writes down the end of the lease; called before each claim."""
        now = self._now()
        if not self._holds or self._deadline - now < (1 - _EXTEND_PART) * self._producer.lease:
            deadline = now + self._producer.lease
            self._wrote = True
            self._generation.hold(deadline, self._env.owner)
            self._deadline, self._holds = deadline, True
        return self._deadline

    def _check_held(self) -> None:
        """Goes on only while the lease lasts.

        :raises LeaseLapsed: If it has ended.
        """
        if self._generation.ended():
            raise self._lapsed()
        if not self._holds:
            return
        if self._now() >= self._deadline:
            renewed = self._generation.deadline()
            if renewed is None or self._now() >= renewed:
                raise self._overdue()
            self._deadline = renewed
        self._hold()

    def _overdue(self) -> LeaseLapsed:
        return LeaseLapsed(
            f"the lease of generation {self._env.generation} was over before it was renewed: others"
            " may have its messages"
        )

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
