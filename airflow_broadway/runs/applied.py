"""Messages whose rows a sink has already, or may get from a copy: they are not handled again.

Before a redelivered message is handled, each other generation with a lapsed lease is settled.  So
its commits in doubt are resolved: a paused process can commit nothing any more, and what it has
committed is in the applied index.

Copies of one message with two ids are found by its identity.  Before they are handled, their
identities are claimed: see :mod:`airflow_broadway.staging.applied`.  Of copies in one generation
the first is handled, and the others are acknowledged when it is settled.  A copy of a message that
another unsettled generation has claimed is released: it is redelivered when that is settled.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.settle import settle
from airflow_broadway.runs.sinks import sink_batchers
from airflow_broadway.runs.sources.pipelines import Custodians
from airflow_broadway.staging.applied import AppliedIndex, Claims
from airflow_broadway.staging.run_folder import SETTLED, SETTLING, StagedRun, iter_open

log = logging.getLogger(__name__)

#: A lease counts as lapsed this long before its deadline, since hosts and brokers have own clocks.
_EARLY: Final = timedelta(seconds=2)
#: Maximum time between two listings of generations, however long their leases are.
_LONGEST: Final = timedelta(seconds=5)


class AppliedMessages:
    """Finds applied messages, and copies, among those that one generation receives.

    :param generation: The generation that receives.
    """

    def __init__(
        self, staged: StagedRun, pipeline: Pipeline, ports: Ports, generation: str
    ) -> None:
        self._staged = staged
        self._pipeline = pipeline
        self._ports = ports
        self._generation = generation
        self._index = AppliedIndex(staged.store, staged.pipeline)
        self._claims = Claims(staged.store, staged.pipeline, generation)
        self._active = pipeline.run.source.asks_broker and bool(sink_batchers(pipeline))
        producer = pipeline.producer
        #: Whether copies are looked for among all messages, not only among redelivered ones.
        self._declared = producer.message_identity is not None
        self._by_identity = self._declared or not producer.assigns_ids
        #: The time from which generations are listed again, and the unsettled ones.
        self._again_at = datetime.min.replace(tzinfo=UTC)
        self._open: set[str] = set()
        #: The identities of the messages that this generation handles.
        self._handled: set[str] = set()
        #: The messages whose rows a sink has, the copies of others, and those without an identity.
        self.already_applied = self.duplicates = self.without_identity = 0

    @property
    def claims(self) -> int:
        """The number of files of claims."""
        return self._claims.count

    def sort(
        self, messages: Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message], Sequence[Message]]:
        """Sorts received messages, before they are handled.

        :returns: Copies of others, to acknowledge, which the archive has under another id; those to
            acknowledge since they are applied, which it lacks; those to release, of which another
            generation holds a copy; and those to handle.
        :raises BroadwayError: If another generation cannot be settled, so that it is unknown
            whether a message's rows are committed.
        """
        redelivered = {message.message_id for message in messages if message.redelivered}
        if not self._active or not (redelivered or self._declared):
            return [], [], [], messages
        identities = self._identities(messages) if self._by_identity else {}
        claimed = self._claim(identities, redelivered) if identities else set()
        listed = self._settle_lapsed() if redelivered else False
        if listed or identities:
            self._index.read_new(self._staged.clock.now())
        copies, applied, released, others = [], [], [], []
        for message in messages:
            identity = identities.get(message.message_id)
            if message.redelivered and self._index.has(message.message_id, self._sent_at(message)):
                self.already_applied += 1
                applied.append(message)
            elif identity not in (None, message.message_id) and self._index.has(str(identity)):
                self.already_applied += 1
                copies.append(message)
            elif identity in self._handled:
                self.duplicates += 1
                copies.append(message)
            elif identity in claimed:
                released.append(message)
            else:
                others.append(message)
                if identity is not None:
                    self._handled.add(identity)
        if identities and len(others) < len(messages):
            ids = identities.keys() & {message.message_id for message in others}
            self._claims.reduce({key: identities[key] for key in ids}, redelivered)
        if released:
            log.info("%s released: another run holds copies.", pluralize(len(released), "message"))
        return copies, applied, released, others

    def _identities(self, messages: Sequence[Message]) -> dict[str, str]:
        """Returns the identities of messages of which there may be copies, by message id."""
        producer = self._pipeline.producer
        identities = {}
        for message in messages:
            if not (self._declared or message.redelivered):
                continue
            identity = producer.identity_of(message)
            self.without_identity += identity is None
            if identity is None and message.redelivered and not producer.assigns_ids:
                # The id that it had when it was released: a settlement that dies may have released
                # it twice.
                identity = message.message_id
            if identity is not None:
                identities[message.message_id] = identity
        return identities

    def _claim(
        self, identities: Mapping[str, str], redelivered: Collection[str]
    ) -> AbstractSet[str]:
        """Claims identities; returns those that other unsettled generations have claimed.

        Of two generations that claim the same, at least one reads the claim of the other.
        """
        first = not self._claims.count
        self._claims.add(identities, redelivered)
        others = self._claims.of_others()
        if not first and all(map({*identities.values()}.isdisjoint, others.values())):
            return set()
        # A generation that is not open any more has written to the index what it committed.
        self._settle_lapsed(now=True)
        self._claims.remove_except(self._open)
        return {key for name in self._open & others.keys() for key in others[name]}

    def _sent_at(self, message: Message) -> datetime | None:
        try:
            sent_at: datetime | None = self._pipeline.producer.enqueued_at(message)
        except (OverflowError, TypeError, ValueError):  # the timestamp may be forged
            return None
        return sent_at

    def _settle_lapsed(self, *, now: bool = False) -> bool:
        """Settles other generations of the queue with a lapsed lease; returns whether it looked.

        A settlement that has begun is completed: it may have released messages, as those behind a
        failed one of their group, and not have added them to the index yet.

        :param now: Whether to list them even if they were listed a short time ago.
        """
        staged, time = self._staged, self._staged.clock.now()
        if time < self._again_at and not (now or self._pipeline.producer.keeps_order):
            return False
        again_at = time + _LONGEST
        self._open.clear()
        own = staged.generation(self._generation).lease
        custodians = Custodians(self._pipeline, self._ports, staged)
        with closing(custodians):
            for other, record in iter_open(staged.store, staged.pipeline, None):
                if record.state == SETTLED or record.generation == self._generation:
                    continue
                if not _is_of_queue(record.lease, own):
                    self._open.add(record.generation)
                    continue
                lapses = other.lease(record).deadline - _EARLY
                if lapses > time and record.state != SETTLING:
                    self._open.add(record.generation)
                    again_at = min(again_at, lapses)
                    continue
                log.info(
                    "Generation %s has lapsed, or is being settled: settling it.", record.generation
                )
                settle(
                    other,
                    record,
                    self._pipeline,
                    custodians.of,
                    release_damaged=True,
                    connections=self._ports.connections,
                )
        self._again_at = again_at
        return True


def _is_of_queue(lease: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Returns whether two leases, as JSON, are of one queue."""
    state, other = lease["state"], own["state"]
    names = state.keys() & other.keys() & {"queue", "path"}
    return lease["kind"] == own["kind"] and all(state[name] == other[name] for name in names)
