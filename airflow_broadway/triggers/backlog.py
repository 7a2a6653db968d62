"""Starts runs, or resumes a sensor, when a queue's backlog has reached its bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

from airflow_broadway.adapters.backlog import check_age, count_runs, look_at, run_in_thread
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.core.model.rules import POSITIVE, TEXT
from airflow_broadway.core.reference import import_class, make_ref
from airflow_broadway.runs.backlog.crossings import BacklogWatch
from airflow_broadway.runs.backlog.queues import WatchedQueues

__all__ = ["BroadwayBacklogReachedTrigger", "BroadwayBacklogTrigger", "queues_of"]


def queues_of(pipeline: Any) -> WatchedQueues:
    """Returns the queues of an operator's ``pipeline``; one passed as text is imported.

    :param pipeline: Or a producer alone, whose queue's name then stands for the pipeline's.
    :raises OptionsError: If it is not a pipeline.
    :raises PipelineError: If it cannot be imported.
    """
    if isinstance(pipeline, Producer):
        return WatchedQueues(str(getattr(pipeline, "queue", pipeline.kind)), pipeline.shards())
    ref = make_ref(pipeline)
    return WatchedQueues.of(import_class(str(ref["class"]))(**ref["options"]))


class BroadwayBacklogTrigger(BaseEventTrigger):
    """Fires an event for an asset's watcher, once per crossing, when a backlog reaches its bounds.

    ``AssetWatcher(name="backlog", trigger=BroadwayBacklogTrigger(Flights, dag_id="flights",
    min_messages=10_000))``; ``Flights.dag(…, schedule=backlog(…))`` creates all of it.

    It is rearmed when a run of the Dag has been created, or the backlog has fallen.  While the Dag
    has ``max_runs`` runs, no event fires.

    :param pipeline: A :class:`Broadway` subclass, an instance, or its import path; or a producer.
    :param dag_id: The Dag that drains the queue.
    :param min_messages: Messages ready to be received.
    :param max_age: Age of the oldest ready message, in seconds.
    :param poke_interval: Seconds between two checks.
    :param max_runs: The Dag's ``max_active_runs``.
    :param staging: URI of the staging root; by default ``[broadway] staging``.
    :param queues: The pipeline as serialized by :meth:`serialize`, in place of ``pipeline``.
    :raises OptionsError: While the Dag is parsed: if no bound is set, one breaks its rule, or the
        producer's options contain a secret or a template.
    """

    def __init__(
        self,
        pipeline: Any = None,
        *,
        dag_id: str,
        min_messages: int | None = None,
        max_age: float | None = None,
        poke_interval: float = 30.0,
        max_runs: int = 1,
        staging: str | None = None,
        queues: str = "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dag_id = dag_id
        self.min_messages = min_messages
        self.max_age = max_age
        self.poke_interval = poke_interval
        self.max_runs = max_runs
        self.staging = staging
        # Stored queues have been validated.  An error here would end the triggerer, with all its
        # triggers; one in run() ends only this trigger.
        self.queues = queues or self._dump_queues(pipeline)

    def _dump_queues(self, pipeline: Any) -> str:
        """Returns the serialized queues, after validating the options."""
        bounds = _bounds(self)
        for name, rule in (("dag_id", TEXT), ("max_runs", POSITIVE)):
            value = getattr(self, name)
            if not rule.holds(value):
                raise OptionsError(f"BroadwayBacklogTrigger.{name}", rule.text, value)
        queues = queues_of(pipeline)
        check_age(queues, bounds, "Backlog")
        return queues.dumps()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return _serialize(self, *_FIELDS, "max_runs")

    async def run(self) -> AsyncIterator[TriggerEvent]:
        watch = BacklogWatch(
            bounds=_bounds(self),
            look=_make_reader(self.queues, self.staging, self.dag_id),
            runs=partial(count_runs, self.dag_id),
            max_runs=self.max_runs,
            lag=json.loads(self.queues)["lag"],
        )
        while True:
            event, wait = await run_in_thread(watch.step)
            if event is not None:
                yield _to_event(self.queues, event)
            await asyncio.sleep(wait)


class BroadwayBacklogReachedTrigger(BaseTrigger):
    """Resumes a sensor when a backlog has reached its bounds.

    :param queues: The queues, as serialized by :meth:`WatchedQueues.dumps`.
    :param dag_id: The sensor's Dag.
    """

    def __init__(
        self,
        *,
        queues: str,
        dag_id: str,
        min_messages: int | None = None,
        max_age: float | None = None,
        poke_interval: float = 30.0,
        staging: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.queues = queues
        self.dag_id = dag_id
        self.min_messages = min_messages
        self.max_age = max_age
        self.poke_interval = poke_interval
        self.staging = staging

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return _serialize(self, *_FIELDS)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        look = _make_reader(self.queues, self.staging, self.dag_id)
        watch = BacklogWatch(bounds=_bounds(self), look=look)
        event = None
        wait = self.poke_interval  # the sensor has just checked
        while event is None:
            await asyncio.sleep(wait)
            event, wait = await run_in_thread(watch.step)
        yield _to_event(self.queues, event)


#: The arguments that both triggers have.
_FIELDS = ("queues", "dag_id", "min_messages", "max_age", "poke_interval", "staging")


def _serialize(trigger: BaseTrigger, *names: str) -> tuple[str, dict[str, Any]]:
    path = f"{type(trigger).__module__}.{type(trigger).__qualname__}"
    return path, {name: getattr(trigger, name) for name in names}


def _bounds(trigger: BroadwayBacklogTrigger | BroadwayBacklogReachedTrigger) -> Backlog:
    return Backlog(
        min_messages=trigger.min_messages,
        max_age=trigger.max_age,
        poke_interval=trigger.poke_interval,
    )


def _make_reader(queues: str, staging: str | None, dag_id: str) -> Any:
    """Returns a function that loads the queues and reads their depth: errors are retried."""
    return lambda: look_at(WatchedQueues.loads(queues), staging, dag_id=dag_id, by="the triggerer")


def _to_event(queues: str, payload: dict[str, Any]) -> TriggerEvent:
    name = json.loads(queues)["pipeline"]
    return TriggerEvent({"pipeline": name, **payload})  # type: ignore[no-untyped-call]
