"""How long a run's files stay: until the run has balanced, and then a while.

A run has *balanced* once all its messages are settled and their sum is right.  Whoever finds that
calls :func:`mark_balanced`: its sensor, or the sweep of a later run if it died.  The sweep of a
still later one removes what has been marked for long enough.  A run that was never marked, or that
has an unsettled generation, stays whatever its age.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION, paths
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.run_folder import (
    OPEN,
    SETTLED,
    GenerationRecord,
    StagedRun,
    dag_folder,
    iter_unsettled,
)
from airflow_broadway.staging.store import Folder, Store

log = logging.getLogger(__name__)

#: Seconds for which a balanced run's files stay.
KEEP = 7 * 24 * 3600.0
#: A folder beside the runs of a Dag.  The name of a file in it says which run balanced, and when.
BALANCED = "_balanced"
_STAMP = "%Y%m%dT%H%M%S"
_MARK = re.compile(r"(\d{8}T\d{6})-(.+)\.json")


def mark_balanced(run: StagedRun) -> None:
    """Note that all generations of a run are settled, and that the sum is right."""
    now = run.clock.now()
    name = f"{now.astimezone(UTC).strftime(_STAMP)}-{encode_name(run.run_id)}.json"
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
    """Remove the files of runs that balanced longer than ``keep`` seconds ago; oldest first.  And
    what somebody who died was writing beside the runs.

    :param keep: Seconds since the last mark.
    :param spared: Ids of runs to leave alone: an old run may have been cleared, and be at work.
    :param limit: The most runs that one call removes.
    :returns: The ids of the runs removed.
    """
    clock = clock or SystemClock()
    folder = dag_folder(store, pipeline, dag_id)
    before = clock.now() - timedelta(seconds=keep)
    for each in ("", OPEN, BALANCED):  # what lies in a run's own folder goes with it
        folder.remove_temporary(each, before)
    store.folder("").remove_temporary("", before)
    due = _marked_before(folder, before)
    if not due:
        return []
    unsettled = {run.run_id for run, _ in iter_unsettled(store, pipeline, dag_id)}
    removed: list[str] = []
    for names in due:
        if len(removed) >= limit:
            break
        run_id = _run_id(folder, names[-1])
        if run_id is None or run_id in spared:
            continue
        run = StagedRun(store, pipeline=pipeline, dag_id=dag_id, run_id=run_id, clock=clock)
        records = run.generations()
        if run_id in unsettled or any(each.state != SETTLED for each in records):
            log.warning("run %r was marked balanced but has an unsettled generation: kept", run_id)
            continue
        _remove_files(run, records)
        # The marks go last: whoever dies before leaves them for the next sweep.
        for name in names:
            folder.remove(f"{BALANCED}/{name}")
        removed.append(run_id)
    return removed


def _marked_before(folder: Folder, before: datetime) -> list[list[str]]:
    """The names of each run's marks, for all runs whose last mark is older, oldest first."""
    marks: dict[str, list[tuple[datetime, str]]] = {}
    for name in folder.list(BALANCED):
        mark = _MARK.fullmatch(name)
        at = None if mark is None else _instant(mark[1])
        if mark is not None and at is not None:  # else it is not ours
            marks.setdefault(mark[2], []).append((at, name))
    # A run that was cleared and balanced again counts from its last mark.
    return [[name for _, name in found] for found in marks.values() if found[-1][0] < before]


def _run_id(folder: Folder, mark: str) -> str | None:
    """The run that a mark is of; ``None`` for one that another sweep has removed, or damaged."""
    path = f"{BALANCED}/{mark}"
    try:
        return str(json.loads(folder.read(path))["run_id"])
    except FileNotFoundError:
        return None
    except (StagingError, ValueError, KeyError, TypeError) as error:
        log.warning("%s names no run, and is left alone: %s", path, error)
        return None


def remove_run(run: StagedRun) -> None:
    """Remove the files of one run, whose generations are all settled."""
    _remove_files(run, run.generations())
    suffix = f"-{encode_name(run.run_id)}.json"
    for name in run.dag.list(BALANCED):
        match = _MARK.fullmatch(name)
        if match is not None and name == f"{match[1]}{suffix}":
            run.dag.remove(f"{BALANCED}/{name}")


def _remove_files(run: StagedRun, records: Iterable[GenerationRecord]) -> None:
    # A record without its folder would count as unsettled, and keep the run for good, if whoever
    # removes it died amid: so records go first, and before them their copies on the list.
    for record in records:
        run.forget_open(record.generation)
        run.files.remove(paths.generation(record.generation))
    run.files.remove_all()


def _instant(stamp: str) -> datetime | None:
    try:
        return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)
    except ValueError:  # no instant, so none of ours
        return None
