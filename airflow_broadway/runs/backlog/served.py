"""Which run serves the events of a backlog: one that began after they were told.

Two triggerers may tell one crossing, as while one takes over from another.  Airflow makes one run
of both events, or a second run if the first was made by then.  The first run took what waited; so
the second finds that a run began after its events, and ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.staging.run_folder import StagedRun, dag_folder
from airflow_broadway.staging.store import Folder

#: In the folder of a pipeline's runs in a Dag: the last run that events started, and when.  No
#: run's folder begins with ``_``.
_MARK: Final = "_events/served.json"


def claim_events(
    run: StagedRun, events: Sequence[Mapping[str, Any]], clock: Clock | None = None
) -> str | None:
    """Claim the events that started a run for it, before it receives.

    Two runs that begin at the same moment may both have them: the later then finds what is left.

    :param events: What :class:`BacklogWatch` told.
    :returns: Why another run has served them, if one has; else ``None``.
    :raises StagingError: If the mark cannot be written.
    """
    folder = dag_folder(run.store, run.pipeline, run.dag_id)
    told = max(datetime.fromisoformat(str(event["at"])) for event in events)
    mark = _read(folder)
    if mark is not None and mark[0] != run.run_id and mark[1] > told:
        return (
            f"What started this run was told at {told.isoformat()}: {events[-1]['reason']}.  The"
            f" run {mark[0]} began at {mark[1].isoformat()}, and took what waited"
        )
    now = (clock or SystemClock()).now()
    folder.replace(_MARK, json.dumps({"run_id": run.run_id, "at": now.isoformat()}))
    return None


def _read(folder: Folder) -> tuple[str, datetime] | None:
    """The last run, and when it began; ``None`` if that is not known."""
    try:
        value = json.loads(folder.read(_MARK))
        return str(value["run_id"]), datetime.fromisoformat(value["at"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
