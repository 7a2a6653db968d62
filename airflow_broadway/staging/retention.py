"""Removes the files of runs some time after they have balanced.

A run has *balanced* once all its messages are settled and the outcome classes add up.  Its sensor,
or the sweep of a later run, then calls :func:`mark_balanced`.  A later sweep removes runs with an
old mark.  A run without a mark, or with an unsettled generation, is kept at any age.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.layout import VERSION
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

#: Retention of a balanced run's files in seconds.
KEEP = 7 * 24 * 3600.0
#: A folder next to the runs of a Dag.  The file names in it are the time and the run that balanced.
BALANCED = "_balanced"
_STAMP = "%Y%m%dT%H%M%S"
_MARK = re.compile(r"(\d{8}T\d{6})-(.+)\.json")


def mark_balanced(run: StagedRun) -> None:
    """Records that all generations of a run are settled and that the run balances."""
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
    """Removes the files of runs that balanced longer than ``keep`` seconds ago, oldest first.

    Also removes temporary files that dead processes left next to the runs.

    :param keep: Seconds since the last mark.
    :param spared: Ids of runs to keep: an old run may have been cleared and be running.
    :param limit: Maximum number of runs that one call removes.
    :returns: The ids of the runs removed.
    """
    clock = clock or SystemClock()
    folder = dag_folder(store, pipeline, dag_id)
    before = clock.now() - timedelta(seconds=keep)
    for subfolder in ("", OPEN, BALANCED):  # a run's own folder is removed as a whole
        folder.remove_temporary(subfolder, before)
    store.folder("").remove_temporary("", before)
    due = _find_due_marks(folder, before)
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
        if _reported_at(run) >= before:  # it was cleared, and a later mark counts
            folder.remove(*(f"{BALANCED}/{name}" for name in names))
            continue
        records = run.generations()
        if run_id in unsettled or any(record.state != SETTLED for record in records):
            log.warning("run %r was marked balanced but has an unsettled generation: kept", run_id)
            continue
        _remove_files(run, records)
        # Marks are removed last: if the process dies before, the next sweep finds them.
        folder.remove(*(f"{BALANCED}/{name}" for name in names))
        removed.append(run_id)
    return removed


def _find_due_marks(folder: Folder, before: datetime) -> list[list[str]]:
    """Returns the names of each run's marks that are older, oldest run first.

    They are listed in order of time: the number of later ones does not matter.
    """
    marks: dict[str, list[str]] = {}
    stamp = before.astimezone(UTC).strftime(_STAMP)
    for name in folder.list(BALANCED, until=stamp):
        mark = _MARK.fullmatch(name)
        if mark is not None and name < stamp:  # otherwise a foreign file
            marks.setdefault(mark[2], []).append(name)
    return list(marks.values())


def _reported_at(run: StagedRun) -> datetime:
    """Returns the time of a run's report, which precedes its last mark."""
    try:
        return datetime.fromisoformat(json.loads(run.files.read(paths.REPORT))["at"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return datetime.min.replace(tzinfo=UTC)


def balanced_runs(folder: Folder) -> dict[str, str]:
    """Returns the folder names of a Dag's balanced runs, with a sortable time of the last mark."""
    marks = filter(None, map(_MARK.fullmatch, folder.list(BALANCED)))
    return {mark[2]: mark[1] for mark in marks}


def _run_id(folder: Folder, mark: str) -> str | None:
    """Reads the run of a mark; ``None`` if the mark was removed by another sweep or is damaged."""
    path = f"{BALANCED}/{mark}"
    try:
        return str(json.loads(folder.read(path))["run_id"])
    except FileNotFoundError:
        return None
    except (StagingError, ValueError, KeyError, TypeError) as error:
        log.warning("%s names no run and is skipped: %s", path, error)
        return None


def remove_run(run: StagedRun) -> None:
    """Removes the files of one run, whose generations are all settled."""
    _remove_files(run, run.generations())
    for name in run.dag.list(BALANCED):
        mark = _MARK.fullmatch(name)
        if mark is not None and mark[2] == encode_name(run.run_id):
            run.dag.remove(f"{BALANCED}/{name}")


def _remove_files(run: StagedRun, records: Iterable[GenerationRecord]) -> None:
    # If the process dies meanwhile, a record without its folder would count as unsettled and keep
    # the run forever: so records are removed first, and before them their copies on the list.
    generations = [record.generation for record in records]
    run.forget_open(*generations)
    run.files.remove(*map(paths.generation, generations))
    run.files.remove_all()
