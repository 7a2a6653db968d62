"""Receives for one generation, in the run's own thread.

A partition is claimed before its first message is delivered to the pipeline: a version of its claim
is created in staging, and the group's offset is committed again, with a mark.  So a group that has
members or rejects commits refuses the run before any callback, and runs with another staging folder
see the claim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.custody.findings import enforce
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.kafka import opening
from airflow_broadway.producers.kafka.claims import (
    Claims,
    Committed,
    Place,
    group_files,
    name_of,
    places_of,
)
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.errors import Truncated, is_out_of_range, is_passing
from airflow_broadway.producers.kafka.options import KafkaOptions
from airflow_broadway.producers.kafka.reader import PartitionReader, Silence
from airflow_broadway.producers.kafka.records import Copy, Records
from airflow_broadway.producers.kafka.settling import Claim, minus
from airflow_broadway.producers.kit.generation_log import forget_ended
from airflow_broadway.producers.kit.state_files import day_of, timestamp_of

log = logging.getLogger(__name__)

#: The fraction of a lease after which the source itself extends the deadline.
_EXTEND_PART: Final = 0.25
#: Days for which the report of a settled generation is kept.
_KEPT_DAYS: Final = 7
#: Seconds between two checks whether the run is to stop.
_STOP_INTERVAL: Final = 0.2
#: Seconds for which a receive waits for more messages after its first.
_GATHER_TIMEOUT: Final = 0.02


class KafkaSource:
    """Receives for one generation."""

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._producer, self._env, self._clock = producer, env, env.clock
        #: Whether the consumer's assignment matches the readers' positions.
        self._assigned = False
        self._received = 0
        self._stopped = self._closed = False
        #: Whether a backfill ended before its interval did.
        self._unread = False
        #: Ids of delivered messages that may arrive again, also by a retry topic.
        self._seen: set[str] = set()
        self._records = Records(env.generation, by_key=producer.order == "key")
        self._cluster = Cluster(producer, env)
        try:
            self._open()
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            self._cluster.close()
            raise

    def _open(self) -> None:
        producer, env = self._producer, self._env
        partitions = self._cluster.topics()
        files = group_files(env.staging, self._cluster.id, producer.group_id)
        forget_ended(files, day_of(self._clock.now(), before=_KEPT_DAYS))
        self._live = env.interval is None
        self._folder = "claims" if self._live else opening.folder_of(str(env.owner.get("run_id")))
        self._claims = Claims(files, self._folder)
        if not self._live:  # a retry topic contains copies of the log's own messages
            partitions = {t: n for t, n in partitions.items() if t not in producer.retry_topics}
        kind = opening.Opening if self._live else opening.BackfillOpening
        self._opening = kind(producer, env, self._cluster, self._claims, partitions)
        enforce(self._opening.check(), log)
        concurrency = 1 if env.alone else producer.concurrency
        self._places = places_of(partitions)[env.index % concurrency :: concurrency]
        self._generation = self._claims.generation(env.generation)
        #: The lease deadline as last read or written, and whether it is recorded.
        self._deadline = self._now() + producer.lease
        self._holds = False
        self._silence = Silence(env.clock, wait=self._cluster.fetch_wait)
        self._readers: dict[Place, PartitionReader] = {}
        #: Messages that retention removed before or during the run, by partition.
        self._expired: dict[Place, int] = {}
        views = self._look(self._places)
        self._begin({place: view for place, view in views.items() if view.begins})

    def _now(self) -> float:
        return self._clock.now().timestamp()

    @property
    def lease(self) -> Lease:
        if not self._holds:  # a lease without messages cannot lapse
            self._deadline = self._now() + self._producer.lease
        readers = list(self._readers.items())
        expired = sum(self._expired.values())
        return Lease(
            kind=self._producer.kind,
            generation=self._env.generation,
            seconds=self._producer.lease,
            deadline=timestamp_of(self._deadline),
            owner=dict(self._env.owner),
            state={
                "queue": self._producer.place,
                "cluster": self._cluster.id,
                "own": [name_of(place) for place in self._places],
                "read": {name_of(p): r.to_json() for p, r in readers if r.claim is not None},
                "stopped": self._stopped,
                **({} if self._live else {"backfill": self._folder}),
                **({"unread": True} if self._unread else {}),
                **({"set_aside": {"expired": expired}} if expired else {}),
            },
        )

    # -- partitions ----------------------------------------------------------------------------

    def _look(self, places: Sequence[Place]) -> dict[Place, opening.View]:
        """Determines the state of partitions, and creates their readers.

        :raises ProducerError: If the run is refused.
        """
        if not places:
            return {}
        views, findings = self._opening.look(places)
        enforce(findings, log)
        now = self._now()
        for place, view in views.items():
            self._readers[place] = PartitionReader(place, view, now, self._producer, self._env)
            self._assigned = False
            if view.expired:
                self._expired[place] = view.expired
        return views

    def _begin(self, views: Mapping[Place, opening.View]) -> None:
        """Commits the start offset of partitions without a committed offset."""
        free = {place: view.state.start for place, view in views.items() if not view.held_until}
        if not free or not self._live:
            return
        # The lease is not recorded yet: after a kill here, others wait for the grace period only.
        claimed = self._create(free, self._now())
        self._commit(claimed)
        for place in claimed:
            reader = self._readers[place]
            reader.view = reader.view._replace(known=self._release(place))

    def _claim(self, ends: Mapping[Place, int]) -> set[Place]:
        """Claims partitions up to the given offsets.

        :returns: The partitions that this generation holds now; the others have changed, or belong
            to another run.
        :raises LeaseLapsed: If the generation was ended meanwhile.
        """
        before = {p: self._readers[p] for p in ends if self._readers[p].claim is None}
        changed: set[Place] = set()
        if self._live:
            committed = self._cluster.committed(list(ends))
            changed = {p for p in ends if committed.get(p) != self._readers[p].view.committed}
            self._look([place for place in before if place in changed])
        same = {place: end for place, end in ends.items() if place not in changed & before.keys()}
        claimed = self._create(same, self._hold())
        if any(place not in claimed and place not in before for place in ends):
            raise self._overdue()
        if self._generation.ended():
            for place in claimed:
                self._release(place, claimed[place])
            raise self._lapsed()
        if self._live:
            # A commit by another consumer is not overwritten: the settlement detects it.
            self._commit({place: own for place, own in claimed.items() if place not in changed})
            # A run with another staging folder may have claimed concurrently: the last commit wins.
            committed = self._cluster.committed([p for p in before if p in claimed])
            for place, commit in committed.items():
                if commit.owner not in ("", self._opening.owner):
                    self._release(place)
                    del claimed[place]
        self._look([place for place in same if place not in claimed])
        return set(claimed)

    def _create(self, ends: Mapping[Place, int], until: float) -> dict[Place, Claim | None]:
        """Creates the next versions of claims.

        :returns: The previous claims, by partition.
        """
        created: dict[Place, Claim | None] = {}
        for place, end in ends.items():
            reader = self._readers[place]
            state, own = reader.view.state, reader.claim
            claim = own or replace(
                state,
                generation=self._env.generation,
                until=until,
                done=minus(state.done, ((0, state.start),)),
            )
            claim = replace(claim, end=end, epoch=reader.epoch)
            if self._claims.replace(place, own or reader.view.known, claim):
                created[place], reader.claim = own, claim
        return created

    def _commit(self, places: Mapping[Place, Claim | None]) -> None:
        """Commits the offset of claimed partitions again, with a mark.

        :param places: The previous claims, by partition.
        :raises ProducerError: If the cluster rejects the commit; the claims are released.
        """
        owner, durable = self._opening.owner, self._claims.durable
        offsets = {
            place: Committed.of(claim, owner, durable=durable)
            for place in places
            if (claim := self._readers[place].claim) is not None
        }
        try:
            self._cluster.commit(offsets)
        except BroadwayError:
            for place, before in places.items():
                self._release(place, before)
            raise
        for place, commit in offsets.items():
            reader = self._readers[place]
            reader.view = reader.view._replace(committed=commit)

    def _release(self, place: Place, before: Claim | None = None) -> Claim:
        """Releases a claim from which no message was delivered, and returns the remaining one.

        :param before: The claim that it extended.
        """
        reader = self._readers[place]
        assert reader.claim is not None
        after = before or reader.claim.freed()
        self._claims.end(place, self._env.generation, after)
        reader.claim = before
        return after

    # -- the lease -----------------------------------------------------------------------------

    def _hold(self) -> float:
        """Records the lease deadline; called before each claim."""
        now = self._now()
        if not self._holds or self._deadline - now < (1 - _EXTEND_PART) * self._producer.lease:
            deadline = now + self._producer.lease
            self._generation.hold(deadline, self._env.owner)
            self._deadline, self._holds = deadline, True
        return self._deadline

    def _check_held(self) -> None:
        """Checks that the lease is still valid, and extends it.

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

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if demand < 1 or self._stopped:
            return []
        self._check_held()
        monotonic = self._clock.monotonic
        end = monotonic() + timeout
        while not self._env.stopping():
            quiet = all(reader.quiet for reader in self._readers.values())
            if quiet and self._refresh_due_readers():
                continue
            left = max(0.0, end - monotonic()) if quiet else _STOP_INTERVAL
            busy = [place for place, reader in self._readers.items() if not reader.quiet]
            silent = self._silence.overdue(busy)
            if silent is not None:
                position = self._readers[silent].position
                raise self._cluster.silence(silent, position, "nothing can be received")
            self._assign()
            records = self._fetch(demand, min(_STOP_INTERVAL, left))
            self._silence.listened(busy, all_heard=len(records) < demand)
            messages = self._process(records)
            if messages:
                return messages
            if quiet and not records and left <= 0:
                break
        return []

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def _refresh_due_readers(self) -> bool:
        """Refreshes waiting partitions; returns whether any of them has something to read."""
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
        """Assigns each unfinished partition at its reader's position."""
        if self._assigned:
            return
        wanted = {place: reader for place, reader in self._readers.items() if not reader.finished}
        for reader in wanted.values():
            reader.at_end = False
        self._cluster.assign(
            {place: reader.position for place, reader in wanted.items()},
            {place: reader.epoch for place, reader in wanted.items()},
        )
        self._assigned = True

    def _fetch(self, demand: int, wait: float) -> list[Any]:
        """Fetches messages and partition events for up to ``wait`` seconds."""
        consume = self._cluster.consume
        # An interruption may lose fetched records: the next assignment fetches them again.
        self._assigned = False
        records = consume(1, wait)
        if records and demand > 1:
            records += consume(demand - 1, 0.0)
            if len(records) < demand and any(not r.quiet for r in self._readers.values()):
                records += consume(demand - len(records), _GATHER_TIMEOUT)
        self._assigned = True
        return records

    def _process(self, records: Sequence[Any]) -> list[Message]:
        """Claims the offsets of fetched records, and converts them into messages."""
        if not records:
            return []
        self._assigned = False
        fetched: dict[Place, list[Any]] = {}
        out_of_range: list[Place] = []
        previous: tuple[str, int] | None = None
        batch: list[Any] = []
        for record in records:
            error = record.error()
            if error is not None:
                if is_out_of_range(error):
                    out_of_range.append((record.topic(), record.partition()))
                else:
                    self._take_event(record, error)
                continue
            place = record.topic(), record.partition()
            if place != previous:
                batch, previous = fetched.setdefault(place, []), place
                self._silence.heard(place)
            batch.append(record)
            self._readers[place].at_end = False
        self._assigned = True
        messages = self._claim_fetched(fetched) if fetched else []
        for place in out_of_range:
            self._skip_expired(self._readers[place])
        # librdkafka stops fetching a partition after this error: assign it again.
        self._assigned = self._assigned and not out_of_range
        return messages

    def _claim_fetched(self, fetched: Mapping[Place, Sequence[Any]]) -> list[Message]:
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
                        "%s-%d-%d was deleted before it was retried (compacted, or removed by"
                        " retention): it counts as superseded, and is not redelivered",
                        *place,
                        offset,
                    )
                if wanted[place] and reader.position > reader.claimed:
                    ends[place] = reader.ahead(self._cluster.ends(place)[1])
            claimed = self._claim(ends) if ends else set()
        except BaseException:  # the same records are fetched again; re-raised
            self._assigned = False
            for reader, position in before.values():
                reader.position = position
            raise
        if ends:
            # Partitions that changed, or belong to another run, are read from their new offset.
            wanted = {p: records for p, records in wanted.items() if p not in ends or p in claimed}
            self._assigned = len(claimed) == len(ends)
        messages: list[Message] = []
        for place, records in wanted.items():
            new = self._to_messages(self._readers[place], records) if records else []
            self._readers[place].messages += len(new)
            self._received += len(new)
            messages += new
        for place in fetched:
            self._skip_unwanted(self._readers[place])
        return messages

    def _skip_unwanted(self, reader: PartitionReader) -> None:
        """Seeks over offsets that are not wanted, and unassigns a finished partition."""
        target = reader.skip_to()
        if reader.finished:
            self._cluster.leave(reader.place)
        elif target is not None and self._assigned:
            self._cluster.seek(reader.place, target)
            reader.position = target
            reader.at_end = False

    def _to_messages(self, reader: PartitionReader, records: Sequence[Any]) -> list[Message]:
        """Converts records into messages, and delivers each message id once.

        An interrupted settlement may have published a copy twice, or left the original to be
        redelivered too.
        """
        at, taken = self._clock.now(), reader.take(records)
        if reader.retries:
            return self._copies_to_messages(reader, taken, at)
        marks = reader.marks(taken)
        if marks is not None and self._seen:
            topic, partition = reader.place
            fresh = [f"{topic}-{partition}-{r.offset()}" not in self._seen for r in taken]
            taken = [record for record, keep in zip(taken, fresh, strict=True) if keep]
            marks = [mark for mark, keep in zip(marks, fresh, strict=True) if keep]
        messages = self._records.messages(*reader.place, taken, marks, at, self._received)
        if self._producer.order == "none":
            self._seen.update(message.message_id for message in messages if message.redelivered)
        return messages

    def _copies_to_messages(
        self, reader: PartitionReader, copies: Sequence[Copy], at: datetime
    ) -> list[Message]:
        """Converts copies of a retry topic into messages."""
        messages: list[Message] = []
        for copy in copies:
            if copy.message_id in self._seen:
                continue
            self._seen.add(copy.message_id)
            [(attempt, _)] = reader.marks([copy.record]) or [(1, True)]
            mark = max(copy.attempts + 1, attempt), True
            place, position = (copy.topic, copy.partition), self._received + len(messages)
            messages += self._records.messages(*place, [copy], [mark], at, position, copy.receipt)
        return messages

    def _skip_expired(self, reader: PartitionReader) -> None:
        """Skips offsets that retention has removed during this run."""
        low, end = self._cluster.ends(reader.place)
        if low <= reader.position:
            raise Truncated(opening.truncated_text(reader.place, reader.position, end))
        expired = minus(((reader.position, low),), reader.view.state.done)
        text, number = opening.expired_text(reader.place, expired)
        if number and self._producer.on_expired == "fail":
            raise ProducerError(text)
        if number:
            log.error("%s", text)
            self._expired[reader.place] = self._expired.get(reader.place, 0) + number
        reader.position, reader.at_end = low, False

    def _take_event(self, record: Any, error: Any) -> None:
        """Handles an event that the client reports instead of a message."""
        if error.code() == self._cluster.eof:
            reader = self._readers[record.topic(), record.partition()]
            reader.at_end, reader.end = True, record.offset()
            self._silence.heard(reader.place)
        elif is_passing(error):
            log.warning("Kafka: %s", error.str())
        else:
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
            # Otherwise the client would keep fetching until it is closed.
            self._cluster.assign({})
        if not self._live:
            self._unread = not all(reader.quiet for reader in self._readers.values())
        if self._received:
            log.info(
                "Received %s of %s.",
                pluralize(self._received, "message"),
                pluralize(sum(bool(r.messages) for r in self._readers.values()), "partition"),
            )
        return []

    def _finish(self) -> None:
        """Claims up to the end of the log, which may be a transaction marker and no message."""
        ends = {
            place: min(reader.end, reader.limit)
            for place, reader in self._readers.items()
            if reader.at_end and reader.position < min(reader.end, reader.limit)
        }
        if not ends:
            return
        with suppress(BroadwayError):  # otherwise the next run does so
            for place in self._claim(ends):
                self._readers[place].position = ends[place]

    def _warn_of_open_transaction(self, reader: PartitionReader) -> None:
        """Warns if a run ends early because of an open transaction."""
        if not reader.at_end or self._env.stopping():
            return
        with suppress(BroadwayError):  # the warning is not essential
            behind = self._cluster.known_end(reader.place) - reader.end
            # Beyond the reader's end the messages are readable: they arrived as the run ended.
            if behind > 0 and self._cluster.ends(reader.place)[1] <= reader.end:
                log.warning(
                    "%s of %s-%d may not be read yet: they are behind a transaction that is still"
                    " open, at %d.",
                    pluralize(behind, "offset"),
                    *reader.place,
                    reader.end,
                )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
            if self._holds and not any(reader.claim for reader in self._readers.values()):
                # Other runs claimed all partitions: there is nothing to settle.
                self._generation.forget_soon(day_of(self._clock.now()))
        finally:
            self._cluster.close()
