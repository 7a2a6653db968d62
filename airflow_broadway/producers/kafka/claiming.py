"""Claims partitions for one generation, and extends its lease.

A partition is claimed before its first message is handed out: a version of its claim is created in
staging, and the group's offset is committed once more, with a mark.  So a group that has members or
may not be written refuses the run before any callback, and another staging folder sees the claim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from airflow_broadway.core.custody.findings import enforce
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed
from airflow_broadway.producers.kafka.backfill import BackfillOpening, folder_of, milliseconds
from airflow_broadway.producers.kafka.claims import Claim, Claims, Place, group_files
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.offsets import minus
from airflow_broadway.producers.kafka.opening import (
    Opening,
    View,
    commit_of,
    own_places,
    read_mark,
)
from airflow_broadway.producers.kafka.reader import PartitionReader

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

log = logging.getLogger(__name__)

#: The part of a lease that is over when the source itself moves its deadline on.
_EXTEND_PART: Final = 0.25


class ClaimingSource:
    """Opens a group for one generation: finds its partitions, and claims them."""

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._producer, self._env, self._clock = producer, env, env.clock
        #: Whether what is fetched next follows what was fetched before.
        self._assigned = False
        self._cluster = Cluster(producer, env)
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
        self._readers: dict[Place, PartitionReader] = {}
        #: Messages that retention had removed when the run began, and while it read.
        self._expired: dict[Place, int] = {}
        views = self._look(self._places)
        self._begin({place: view for place, view in views.items() if view.begins})

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
            after = self._release(place)
            reader = self._readers[place]
            if self._claims.known(place) == after:
                reader.view = reader.view._replace(claim=after)
            else:  # others took over meanwhile
                self._look([place])

    def _claim(self, ends: Mapping[Place, int]) -> set[Place]:
        """Claims partitions up to some offsets.

        :returns: Those that this generation holds now; others have changed, or are another's.
        :raises LeaseLapsed: If the generation was ended meanwhile.
        """
        fresh = [place for place in ends if self._readers[place].claim is None]
        before = {place: self._readers[place] for place in fresh}
        changed: set[Place] = set()
        if self._live:
            found = self._cluster.committed(list(ends))
            seen = {place: self._readers[place].view.committed for place in ends}
            changed = {place for place in ends if found.get(place) != seen[place]}
            self._look([place for place in fresh if place in changed], anew=False)
        same = {p for p in ends if p not in before or self._readers[p] is before[p]}
        claimed = self._create({place: ends[place] for place in same}, self._hold())
        if any(place not in claimed and place not in before for place in ends):
            raise self._overdue()
        if self._generation.ended():
            for place in claimed:
                self._release(place, claimed[place])
            raise self._lapsed()
        if self._live:
            # Where others have committed meanwhile, the settlement finds it: it is not overwritten.
            own = {p: each for p, each in claimed.items() if p in before or p not in changed}
            self._committed(own)
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

    def _release(self, place: Place, before: Claim | None = None) -> Claim:
        """Gives up a claim of which nothing was handed out; returns the partition as it is then.

        :param before: The claim that it extended.
        """
        reader = self._readers[place]
        assert reader.claim is not None
        after = before or replace(reader.claim, generation="", end=0, until=0.0)
        self._claims.end(place, self._env.generation, after)
        reader.claim = before
        return after

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
