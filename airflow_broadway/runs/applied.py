"""Redelivered messages whose rows a sink has already: they are acknowledged, and not handled again.

Before a redelivered message is handled, each other generation with a lapsed lease is settled.  So
its commits in doubt are resolved: a paused process can commit nothing any more, and what it has
committed is in the applied index.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Final

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.settle import settle
from airflow_broadway.runs.sinks import sink_batchers
from airflow_broadway.runs.sources.pipelines import Custodians
from airflow_broadway.staging.applied import AppliedIndex
from airflow_broadway.staging.run_folder import SETTLED, StagedRun, iter_open

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
        applied = [m for m in messages if m.redelivered and m.message_id in self._index]
        if not applied:
            return [], messages
        ids = {message.message_id for message in applied}
        return applied, [m for m in messages if m.message_id not in ids]

    def _settle_lapsed(self) -> None:
        """Settles other generations with a lapsed lease, and reads the index."""
        staged, now = self._staged, self._staged.clock.now()
        if now < self._again_at:
            return
        again_at = now + _LONGEST
        custodians = Custodians(self._pipeline, self._ports, staged)
        with closing(custodians):
            for other, record in iter_open(staged.store, staged.pipeline, None):
                if record.state == SETTLED or record.generation == self._generation:
                    continue
                lapses = other.lease(record).deadline - _EARLY
                if lapses > now:
                    again_at = min(again_at, lapses)
                    continue
                log.info("The lease of generation %s has lapsed: settling it.", record.generation)
                settle(
                    other,
                    record,
                    self._pipeline,
                    lambda record=record: custodians.of(record),  # type: ignore[misc]
                    connections=self._ports.connections,
                )
        self._index.read_new(now)
        self._again_at = again_at
