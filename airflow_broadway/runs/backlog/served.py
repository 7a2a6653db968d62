"""Claims backlog events for one run, so that a duplicate event does not drain the queue twice.

Two triggerers may report the same crossing, for example while one takes over from the other.
Airflow starts one run for both events, or a second run if the first has already been created.  The
first run drains the backlog.  The second finds that a run began after its events, and ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.staging.run_folder import StagedRun, dag_folder
from airflow_broadway.staging.store import Folder

#: The last run started by events and its time, in the folder of a pipeline's runs in a Dag.  No
#: run's folder begins with ``_``.
_MARK: Final = "_events/served.json"


def claim_events(
    run: StagedRun, events: Sequence[Mapping[str, Any]], clock: Clock | None = None
) -> str | None:
    """Claims the events that started a run, before it receives.

    Two runs that begin at the same moment may both claim them; the later one drains the remainder.

    :param events: Events reported by :class:`BacklogWatch`.
    :returns: The reason why another run has served them; ``None`` if none has.
    :raises StagingError: If the mark cannot be written.
    """
    folder = dag_folder(run.store, run.pipeline, run.dag_id)
    reported_at = max(datetime.fromisoformat(str(event["at"])) for event in events)
    mark = _read(folder)
    if mark is not None and mark[0] != run.run_id and mark[1] > reported_at:
        return (
            f"The event of this run is of {reported_at.isoformat()}: {events[-1]['reason']}.  The"
            f" run {mark[0]} began at {mark[1].isoformat()}, after it, and drained the backlog"
        )
    now = (clock or SystemClock()).now()
    folder.replace(_MARK, json.dumps({"run_id": run.run_id, "at": now.isoformat()}))
    return None


def _read(folder: Folder) -> tuple[str, datetime] | None:
    """Reads the last run and its start; ``None`` if unknown."""
    try:
        value = json.loads(folder.read(_MARK))
        return str(value["run_id"]), datetime.fromisoformat(value["at"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
