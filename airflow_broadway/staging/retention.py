"""How long a run's files stay: until it has balanced, and then a while.

Whoever finds that a run's messages are all settled and add up calls :func:`mark_balanced`; a later
run's sweep removes what has been marked for long enough.  A run that was never marked, or in which
a generation is unsettled, stays whatever its age.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.manifest import VERSION
from airflow_broadway.staging.names import encode_run_id
from airflow_broadway.staging.run import OPEN, SETTLED, GenerationRecord, StagedRun, dag_folder
from airflow_broadway.staging.store import Folder, Store

__all__ = ["KEEP", "mark_balanced", "sweep_retention"]

log = logging.getLogger(__name__)

#: Seconds for which a balanced run's files stay.
KEEP = 7 * 24 * 3600.0
#: Beside the runs of a Dag: which have balanced, and when, by name.
BALANCED = "_balanced"
_STAMP = "%Y%m%dT%H%M%S"
_STAMP_LENGTH = 15


def mark_balanced(run: StagedRun) -> None:
    """Note that all generations of a run are settled, and that the sum is right."""
    now = run.clock.now()
    name = f"{now.astimezone(UTC).strftime(_STAMP)}-{encode_run_id(run.run_id)}.json"
    text = json.dumps({"version": VERSION, "run_id": run.run_id, "at": now.isoformat()})
    run.dag.replace(f"{BALANCED}/{name}", text)


def sweep_retention(
    store: Store,
    pipeline: str,
    dag_id: str,
    *,
    keep: float = KEEP,
    clock: Clock | None = None,
    limit: int = 20,
    spared: Collection[str] = (),
) -> list[str]:
    """Remove the files of runs that balanced longer than ``keep`` seconds ago; oldest first.

    :param spared: Runs to leave alone: an old one may have been cleared, and be at work again.
    :param limit: Runs removed in one call at most.
    :returns: The ids of the runs removed.
    """
    clock = clock or SystemClock()
    folder = dag_folder(store, pipeline, dag_id)
    before = clock.now() - timedelta(seconds=keep)
    marks: dict[str, list[str]] = {}
    for name in folder.list(BALANCED):
        marks.setdefault(name[_STAMP_LENGTH + 1 :].removesuffix(".json"), []).append(name)
    # A run that was cleared and balanced again counts from its last mark.
    due = [names for names in marks.values() if _at(names[-1]) < before]
    if not due:
        return []
    unsettled = _unsettled_runs(folder)
    removed: list[str] = []
    for names in due:
        if len(removed) >= limit:
            break
        try:
            run_id = str(json.loads(folder.read(f"{BALANCED}/{names[-1]}"))["run_id"])
        except FileNotFoundError:  # another sweep was faster
            continue
        if run_id in spared:
            continue
        run = StagedRun(store, pipeline=pipeline, dag_id=dag_id, run_id=run_id, clock=clock)
        if run_id in unsettled or any(each.state != SETTLED for each in run.generations()):
            log.warning("run %r was marked balanced but has an unsettled generation: kept", run_id)
            continue
        run.files.remove_all()
        # The marks go last: whoever dies before leaves them for the next sweep.
        for name in names:
            folder.remove(f"{BALANCED}/{name}")
        removed.append(run_id)
    return removed


def _at(name: str) -> datetime:
    return datetime.strptime(name[:_STAMP_LENGTH], _STAMP).replace(tzinfo=UTC)


def _unsettled_runs(folder: Folder) -> set[str]:
    found: set[str] = set()
    for name in folder.list(OPEN):
        try:
            found.add(GenerationRecord.loads(folder.read(f"{OPEN}/{name}"), name).run_id)
        except FileNotFoundError:
            continue
    return found
