"""Waits until a queue's backlog has reached its bounds; receives nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseSensorOperator, PokeReturnValue, conf

from airflow_broadway.adapters.backlog import check_age, look_at
from airflow_broadway.adapters.host import Host
from airflow_broadway.adapters.parsing import declared, pipeline_ref
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.core.model.rules import SECONDS
from airflow_broadway.runs.backlog.crossings import described, reasons
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.triggers.backlog import BroadwayBacklogReachedTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["BroadwayBacklogSensor"]


class BroadwayBacklogSensor(BaseSensorOperator):
    """Succeeds when a backlog has reached its bounds; its XCom has the depth and the reason.

    A failed check fails the task, whose retries check again; in the triggerer it is logged, and
    repeated with a growing delay, until the sensor's ``timeout``.

    :param pipeline: As for :class:`BroadwayProcessorOperator`. (templated)
    :param min_messages: Messages ready to be received.
    :param max_age: Age of the oldest ready message, in seconds.
    :param staging: URI of the staging root; by default ``[broadway] staging``. (templated)
    :param poke_interval: Seconds between two checks; 30.
    :param deferrable: Wait in the triggerer; by default ``[operators] default_deferrable``.
    :raises OptionsError: While the Dag is parsed: if no bound is set, or one breaks its rule.
    """

    template_fields: Sequence[str] = ("pipeline", "staging")
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#fef7e0"

    def __init__(
        self,
        *,
        pipeline: Any,
        min_messages: int | None = None,
        max_age: float | None = None,
        staging: str | None = None,
        poke_interval: timedelta | float = 30.0,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        seconds = (
            poke_interval.total_seconds() if isinstance(poke_interval, timedelta) else poke_interval
        )
        if not SECONDS.holds(seconds):
            raise OptionsError("Backlog.poke_interval", SECONDS.text, poke_interval)
        super().__init__(poke_interval=seconds, **kwargs)
        self.pipeline = pipeline_ref(pipeline)
        self.min_messages = min_messages
        self.max_age = max_age
        self.staging = staging
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        self.deferrable = deferrable
        known = declared(self.pipeline)
        if known is None:
            self._bounds()
        else:
            self._check_bounds(WatchedQueues.of(known))

    def execute(self, context: Context) -> Any:
        if not self.deferrable:
            return super().execute(context)
        queues = self._queues(context)
        reached = self._read_backlog(queues, context)
        if reached is not None:
            return reached
        return self.defer(
            trigger=BroadwayBacklogReachedTrigger(
                queues=queues.dumps(),
                dag_id=context["ti"].dag_id,
                min_messages=self.min_messages,
                max_age=self.max_age,
                poke_interval=self.poke_interval,
                staging=self.staging,
            ),
            method_name="resume",
            timeout=timedelta(seconds=self.timeout),
        )

    def resume(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        """Continues after the trigger fired."""
        self.log.info("The backlog has reached its bounds: %s.", event["reason"])
        return dict(event)

    def poke(self, context: Context) -> PokeReturnValue:
        reached = self._read_backlog(self._queues(context), context)
        return PokeReturnValue(is_done=reached is not None, xcom_value=reached)

    def _bounds(self) -> Backlog:
        return Backlog(
            min_messages=self.min_messages, max_age=self.max_age, poke_interval=self.poke_interval
        )

    def _queues(self, context: Context) -> WatchedQueues:
        """Returns the queues of the rendered pipeline."""
        queues = WatchedQueues.of(Host(context).load_pipeline(self.pipeline))
        self._check_bounds(queues)
        return queues

    def _check_bounds(self, queues: WatchedQueues) -> None:
        check_age(queues, self._bounds(), "Backlog")

    def _read_backlog(self, queues: WatchedQueues, context: Context) -> dict[str, Any] | None:
        """Reads the depth once; returns it, with the reason, if it reaches a bound."""
        by = f"task {self.task_id}"
        depth = look_at(queues, self.staging, dag_id=context["ti"].dag_id, by=by)
        if depth is None:
            self.log.warning("The broker does not report the depth of the queue.")
            return None
        reached = reasons(self._bounds(), depth)
        self.log.info("%s.", described(depth))
        if not reached:
            return None
        return {"pipeline": queues.pipeline, "reason": " and ".join(reached), **depth._asdict()}
