"""Redelivered messages whose rows a sink has already: they are acknowledged, and not handled again.

Before a redelivered message is handled, each other generation with a lapsed lease is settled.  So
its commits in doubt are resolved: a paused process can commit nothing any more, and what it has
committed is in the applied index.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.settle import settle
from airflow_broadway.runs.sinks import sink_batchers
from airflow_broadway.runs.sources.pipelines import Custodians
from airflow_broadway.staging.applied import AppliedIndex
from airflow_broadway.staging.run_folder import SETTLED, SETTLING, StagedRun, iter_open

log = logging.getLogger(__name__)

#: A lease counts as lapsed this long before its deadline, since hosts and brokers have own clocks.
_EARLY: Final = timedelta(seconds=2)
#: Maximum time between two listings of generations, however long their leases are.
_LONGEST: Final = timedelta(seconds=5)


class AppliedMessages:
    """Finds applied messages among those that one generation receives.

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
        self._active = pipeline.run.source.asks_broker and bool(sink_batchers(pipeline))
        #: The time from which generations are listed again.
        self._again_at = datetime.min.replace(tzinfo=UTC)

    def split(self, messages: Sequence[Message]) -> tuple[list[Message], Sequence[Message]]:
        """Returns the applied messages, and the others.

        :raises BroadwayError: If another generation cannot be settled, so that it is unknown
            whether a message's rows are committed.
        """
        if not self._active or not any(message.redelivered for message in messages):
            return [], messages
        self._settle_lapsed()
        applied = [
            message
            for message in messages
            if message.redelivered and self._index.has(message.message_id, self._sent_at(message))
        ]
        if not applied:
            return [], messages
        ids = {message.message_id for message in applied}
        return applied, [m for m in messages if m.message_id not in ids]

    def _sent_at(self, message: Message) -> datetime | None:
        try:
            sent_at: datetime | None = self._pipeline.producer.enqueued_at(message)
        except (OverflowError, TypeError, ValueError):  # the timestamp may be forged
            return None
        return sent_at

    def _settle_lapsed(self) -> None:
        """Settles other generations of the queue with a lapsed lease, and reads the index.

        A settlement that has begun is completed: it may have released messages, as those behind a
        failed one of their group, and not have added them to the index yet.
        """
        staged, now = self._staged, self._staged.clock.now()
        if now < self._again_at and not self._pipeline.producer.keeps_order:
            return
        again_at = now + _LONGEST
        own = staged.generation(self._generation).lease
        custodians = Custodians(self._pipeline, self._ports, staged)
        with closing(custodians):
            for other, record in iter_open(staged.store, staged.pipeline, None):
                if record.state == SETTLED or record.generation == self._generation:
                    continue
                if not _is_of_queue(record.lease, own):
                    continue
                lapses = other.lease(record).deadline - _EARLY
                if lapses > now and record.state != SETTLING:
                    again_at = min(again_at, lapses)
                    continue
                log.info(
                    "Generation %s has lapsed, or is being settled: settling it.", record.generation
                )
                settle(
                    other,
                    record,
                    self._pipeline,
                    lambda record=record: custodians.of(record),  # type: ignore[misc]
                    release_damaged=True,
                    connections=self._ports.connections,
                )
        self._index.read_new(now)
        self._again_at = again_at


def _is_of_queue(lease: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Returns whether two leases, as JSON, are of one queue."""
    state, other = lease["state"], own["state"]
    names = state.keys() & other.keys() & {"queue", "path"}
    return lease["kind"] == own["kind"] and all(state[name] == other[name] for name in names)
