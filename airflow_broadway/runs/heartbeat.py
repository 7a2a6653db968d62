"""The files that a sensor writes to a run's folder while it watches the run: heartbeat and holds.

Tasks of the run read the heartbeat.  If it is stale, no sensor is active, and the tasks renew and
settle in its place (:mod:`airflow_broadway.runs.watch`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun

log = logging.getLogger(__name__)

#: Seconds after which a heartbeat is stale: the Dag is paused, or its sensor's state was set by
#: hand.  Longer than a usual poke interval including rescheduling.
HEARTBEAT_TIMEOUT: Final = 60.0

#: The file with the start of the hold of each task group of the run.
_HOLDS: Final = "hold.json"


class Heartbeat:
    """The heartbeat of the sensor that watches a run."""

    def __init__(self, run: StagedRun, clock: Clock) -> None:
        self._files = run.files
        self._clock = clock

    def beat(self, again: float = 0.0) -> None:
        """Writes the heartbeat; logs a failure, after which tasks stand in for the sensor.

        :param again: Seconds until the next one, if it may be later than usual.
        """
        text = json.dumps({"at": self._clock.now().isoformat(), "again": again})
        try:
            self._files.replace(paths.HEARTBEAT, text)
        except StagingError as error:
            log.warning("Could not write the heartbeat: %s", error)

    def is_fresh(self) -> bool:
        """Whether the next one is not overdue by ``HEARTBEAT_TIMEOUT``."""
        try:
            last = json.loads(self._files.read(paths.HEARTBEAT))
        except FileNotFoundError:
            return False
        age = self._clock.now() - datetime.fromisoformat(last["at"])
        return age.total_seconds() < HEARTBEAT_TIMEOUT + float(last.get("again", 0.0))


class Hold:
    """The time for which the messages of failed tasks are kept, so that the cause can be fixed.

    :param group: The task group of the run, which may have several.
    """

    def __init__(self, run: StagedRun, group: str, clock: Clock) -> None:
        self._files = run.files
        self._group = group
        self._clock = clock

    def is_on(
        self, seconds: float, failed: Sequence[str], unsettled: Sequence[GenerationRecord]
    ) -> bool:
        """Whether messages are still on hold; begins and logs the hold at the first call.

        :param seconds: Duration of the hold; 0 for none.
        :param failed: The tasks to fix and clear.
        :param unsettled: The generations that are not settled.
        """
        if not seconds or not unsettled:
            return False
        now = self._clock.now()
        holds = self._read()
        since = datetime.fromisoformat(holds.get(self._group, now.isoformat()))
        left = seconds - (now - since).total_seconds()
        if self._group not in holds:
            self._files.replace(_HOLDS, json.dumps({**holds, self._group: now.isoformat()}))
            until = now + timedelta(seconds=left)
            log.warning(
                "Tasks %s failed. Their messages stay held until %s: fix the cause and clear these"
                " tasks before then, and the run continues with them. Messages of tasks that are"
                " not cleared by then are released. Held: %s.",
                list(failed),
                until.strftime("%Y-%m-%d %H:%M:%S UTC"),
                ", ".join(f"{name_of(record)} ({record.generation})" for record in unsettled),
            )
        return left > 0

    def end(self) -> None:
        """Ends the hold after failed tasks were cleared, since they may fail again."""
        try:
            holds = self._read()
            if holds.pop(self._group, None) is not None:
                self._files.replace(_HOLDS, json.dumps(holds))
        except StagingError as error:
            log.warning("Could not end a hold: %s", error)

    def _read(self) -> dict[str, str]:
        try:
            holds: dict[str, str] = json.loads(self._files.read(_HOLDS))
        except FileNotFoundError:
            return {}
        return holds


def name_of(record: GenerationRecord) -> str:
    """Returns the task instance of a generation as in Airflow's UI: ``process[0]``."""
    return record.task_id if record.map_index < 0 else f"{record.task_id}[{record.map_index}]"
