"""What a sensor leaves in a run's folder while it watches the run: its sign of life, and its holds.

Whoever works on the run reads the sign of life: without a fresh one no sensor looks, and others
renew and settle in its place (:mod:`airflow_broadway.runs.stand_in`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun

log = logging.getLogger(__name__)

#: Seconds after which a heartbeat is stale: the Dag is paused, or its sensor was marked.  Longer
#: than any poke interval with the rescheduling after it.
HEARTBEAT_TIMEOUT: Final = 60.0

#: The file that says since when each task group of the run is held.
_HOLDS: Final = "hold.json"


class Heartbeat:
    """The sign that a sensor looks after a run."""

    def __init__(self, run: StagedRun, clock: Clock) -> None:
        self._files = run.files
        self._clock = clock

    def beat(self) -> None:
        """Leave the sign; one that cannot be written is logged, and others then stand in."""
        text = json.dumps({"at": self._clock.now().isoformat()})
        try:
            self._files.replace(paths.HEARTBEAT, text)
        except StagingError as error:
            log.warning("Could not leave a sign of life: %s", error)

    def is_fresh(self) -> bool:
        """Whether a sensor looked within ``HEARTBEAT_TIMEOUT``."""
        try:
            at = json.loads(self._files.read(paths.HEARTBEAT))["at"]
        except FileNotFoundError:
            return False
        age = self._clock.now() - datetime.fromisoformat(at)
        return age.total_seconds() < HEARTBEAT_TIMEOUT


class Hold:
    """Since when the messages of failed tasks are kept, for people to mend what failed.

    :param group: Which task group of the run it is for: a run may have several.
    """

    def __init__(self, run: StagedRun, group: str, clock: Clock) -> None:
        self._files = run.files
        self._group = group
        self._clock = clock

    def is_on(
        self, seconds: float, failed: Sequence[str], held: Sequence[GenerationRecord]
    ) -> bool:
        """Whether ``held`` is still to be kept; begins the hold, and says so, at the first call.

        :param seconds: How long to hold; 0: not at all.
        :param failed: The tasks to mend and clear.
        :param held: The generations that are not settled.
        """
        if not seconds or not held:
            return False
        now = self._clock.now()
        holds = self._read()
        since = datetime.fromisoformat(holds.get(self._group, now.isoformat()))
        left = seconds - (now - since).total_seconds()
        if self._group not in holds:
            self._files.replace(_HOLDS, json.dumps({**holds, self._group: now.isoformat()}))
            until = now + timedelta(seconds=left)
            log.warning(
                "Tasks %s failed. Their messages stay held until %s: mend the cause and clear these"
                " tasks before then, and the run goes on with them. What is not cleared by then is"
                " given back. Held: %s.",
                list(failed),
                until.strftime("%Y-%m-%d %H:%M:%S UTC"),
                ", ".join(f"{name_of(record)} ({record.generation})" for record in held),
            )
        return left > 0

    def end(self) -> None:
        """Forget the hold: what failed was cleared, and may fail again."""
        try:
            holds = self._read()
            if holds.pop(self._group, None) is not None:
                self._files.replace(_HOLDS, json.dumps(holds))
        except StagingError as error:
            log.warning("Could not forget a hold: %s", error)

    def _read(self) -> dict[str, str]:
        try:
            holds: dict[str, str] = json.loads(self._files.read(_HOLDS))
        except FileNotFoundError:
            return {}
        return holds


def name_of(record: GenerationRecord) -> str:
    """The task instance of a generation, as Airflow's UI shows it: ``process[0]``."""
    return record.task_id if record.map_index < 0 else f"{record.task_id}[{record.map_index}]"
