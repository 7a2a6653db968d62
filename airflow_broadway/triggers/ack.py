"""Watches the tasks of a run in the triggerer, and resumes the ack sensor when it has work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from airflow.triggers.base import BaseTrigger, TriggerEvent

__all__ = ["BroadwayAckTrigger"]

#: States of a finished task, unless it is cleared.
FINISHED: Final = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})

#: Seconds before the first check.  Airflow treats a task as killed that is resumed before its
#: supervisor has ended, which may take ``[workers] min_heartbeat_interval``.
FIRST_LOOK_INTERVAL: Final = 6.0
#: Seconds between two checks: at first, and at most.
LOOK_INTERVAL: Final = 1.0
MAX_LOOK_INTERVAL: Final = 5.0


class BroadwayAckTrigger(BaseTrigger):
    """Fires when a watched task has finished, or when leases are due for renewal.

    :param dag_id: The Dag.
    :param run_id: The run.
    :param watch: Task ids.
    :param finished: Watched task instances that had finished at the sensor's last check.
    :param poke_interval: Seconds after which it fires in any case.
    """

    def __init__(
        self,
        *,
        dag_id: str,
        run_id: str,
        watch: list[str],
        finished: int,
        poke_interval: float,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dag_id = dag_id
        self.run_id = run_id
        self.watch = watch
        self.finished = finished
        self.poke_interval = poke_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "dag_id": self.dag_id,
                "run_id": self.run_id,
                "watch": self.watch,
                "finished": self.finished,
                "poke_interval": self.poke_interval,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
        from asgiref.sync import sync_to_async

        count = sync_to_async(RuntimeTaskInstance.get_ti_count)
        waited = 0.0
        step, later = FIRST_LOOK_INTERVAL, LOOK_INTERVAL
        while waited < self.poke_interval:
            step = min(step, self.poke_interval - waited)
            await asyncio.sleep(step)
            waited += step
            step, later = later, min(later * 1.5, MAX_LOOK_INTERVAL)
            finished = await count(
                dag_id=self.dag_id,
                run_ids=[self.run_id],
                task_ids=self.watch,
                states=sorted(FINISHED),
            )
            if finished != self.finished:
                break
        yield TriggerEvent({"status": "look"})  # type: ignore[no-untyped-call]
