"""Start runs, or wake a sensor, when a queue's backlog has reached its bounds; nothing is taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

from airflow_broadway.adapters.backlog import check_age, look_at, off_the_loop, runs_of
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.core.model.rules import POSITIVE, TEXT
from airflow_broadway.core.reference import import_class, make_ref
from airflow_broadway.runs.backlog.crossings import BacklogWatch
from airflow_broadway.runs.backlog.queues import WatchedQueues

__all__ = ["BroadwayBacklogReachedTrigger", "BroadwayBacklogTrigger", "queues_of"]


def queues_of(pipeline: Any) -> WatchedQueues:
    """The queues of whatever an operator takes for a pipeline; one given as text is imported.

    :raises OptionsError: If it is none.
    :raises PipelineError: If it cannot be imported.
    """
    ref = make_ref(pipeline)
    return WatchedQueues.of(import_class(str(ref["class"]))(**ref["options"]))


class BroadwayBacklogTrigger(BaseEventTrigger):
    """Tells an asset's watcher, once a crossing, that a backlog has reached its bounds.

    ``AssetWatcher(name="backlog", trigger=BroadwayBacklogTrigger(Flights, dag_id="flights",
    min_messages=10_000))``; ``Flights.dag(…, schedule=backlog(…))`` makes it all.

    It is armed again when a run of the Dag was made, or the backlog fell.  While the Dag has
    ``max_runs`` runs, nothing is told.

    :param pipeline: A :class:`Broadway` subclass, an instance, or its import path.
    :param dag_id: The Dag that drains the queue.
    :param min_messages: So many messages wait.
    :param max_age: The oldest has waited for so many seconds.
    :param poke_interval: Seconds between two looks.
    :param max_runs: The Dag's ``max_active_runs``.
    :param staging: URI of the staging root; ``[broadway] staging`` unless given.
    :param queues: What :meth:`serialize` makes of the pipeline; instead of it.
    :raises OptionsError: While the Dag is parsed: if no bound is given, one breaks its rule, or the
        producer's options hold a secret or a template.
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
        # What was stored has been checked.  An error here would end the triggerer, with all its
        # triggers; one in run() is this trigger's alone.
        self.queues = queues or self._checked(pipeline)

    def _checked(self, pipeline: Any) -> str:
        """The queues to store, of options that obey their rules."""
        bounds = _bounds(self)
        for name, rule in (("dag_id", TEXT), ("max_runs", POSITIVE)):
            value = getattr(self, name)
            if not rule.holds(value):
                raise OptionsError(f"BroadwayBacklogTrigger.{name}", rule.text, value)
        queues = queues_of(pipeline)
        check_age(queues, bounds, "Backlog")
        return queues.dumps()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return _path(self), {
            "queues": self.queues,
            "dag_id": self.dag_id,
            "min_messages": self.min_messages,
            "max_age": self.max_age,
            "poke_interval": self.poke_interval,
            "max_runs": self.max_runs,
            "staging": self.staging,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        watch = BacklogWatch(
            bounds=_bounds(self),
            look=_looking(self.queues, self.staging, self.dag_id),
            runs=partial(runs_of, self.dag_id),
            max_runs=self.max_runs,
            lag=json.loads(self.queues)["lag"],
        )
        while True:
            told, wait = await off_the_loop(watch.step)
            if told is not None:
                yield _event(self.queues, told)
            await asyncio.sleep(wait)


class BroadwayBacklogReachedTrigger(BaseTrigger):
    """Wakes a sensor when a backlog has reached its bounds.

    :param queues: Which, as :meth:`WatchedQueues.dumps` writes them.
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
        return _path(self), {
            "queues": self.queues,
            "dag_id": self.dag_id,
            "min_messages": self.min_messages,
            "max_age": self.max_age,
            "poke_interval": self.poke_interval,
            "staging": self.staging,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        look = _looking(self.queues, self.staging, self.dag_id)
        watch = BacklogWatch(bounds=_bounds(self), look=look)
        told = None
        wait = self.poke_interval  # the sensor has just looked
        while told is None:
            await asyncio.sleep(wait)
            told, wait = await off_the_loop(watch.step)
        yield _event(self.queues, told)


def _path(trigger: BaseTrigger) -> str:
    return f"{type(trigger).__module__}.{type(trigger).__qualname__}"


def _bounds(trigger: BroadwayBacklogTrigger | BroadwayBacklogReachedTrigger) -> Backlog:
    return Backlog(
        min_messages=trigger.min_messages,
        max_age=trigger.max_age,
        poke_interval=trigger.poke_interval,
    )


def _looking(queues: str, staging: str | None, dag_id: str) -> Any:
    """Looks at queues that are loaded in the look itself: what fails there is tried again."""
    return lambda: look_at(WatchedQueues.loads(queues), staging, dag_id=dag_id, by="the triggerer")


def _event(queues: str, told: dict[str, Any]) -> TriggerEvent:
    name = json.loads(queues)["pipeline"]
    return TriggerEvent({"pipeline": name, **told})  # type: ignore[no-untyped-call]
