"""Writes what a release leaves behind: a queue, a table, an archive, and the staging of dead runs.

``unshare --uts sh -c 'hostname release; python -m tests.release_files'`` writes the folder
:data:`FOLDER` with the code of the checkout; its runs have ended as follows:

- ``manual__1`` is settled.
- ``manual__2`` committed its rows; its leases lapsed before it settled anything.
- ``manual__3`` received those messages again and new ones, and died before its second commit was
  recorded.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from airflow_broadway import Archive
from tests.unit.runs.steps import Point, Run, dies
from tests.unit.runs.test_applied import handle, lapse
from tests.unit.runs.test_sinks import Folder, batch, make

#: Staging names its tables by absolute paths, so that the files are read where they were written.
FOLDER = Path("/var/tmp/airflow-broadway-release")
#: Messages of each run: the numbers from 1 on.
COUNT = 25


class Kept(Folder):
    """Its messages are kept in an archive."""

    name = "Sums"
    archive = Archive()


def run_of_release(run_id: str, finished: Sequence[str] = (), *, create: bool = False) -> Run:
    """Returns a run in :data:`FOLDER`."""
    return make(FOLDER, run_id, pipeline=Kept, finished=finished, create=create)


def write() -> None:
    """Writes :data:`FOLDER`, which must not exist."""
    FOLDER.mkdir()
    settled = run_of_release("manual__1", create=True)
    settled.send(range(1, COUNT + 1))
    settled.all()

    lapsed = run_of_release("manual__2")
    lapsed.send(range(1, COUNT + 1))
    handle(lapsed, lapsed.process())
    lapse(lapsed)

    dead = run_of_release("manual__3")
    dead.send(range(1, COUNT + 1))
    pulled = dead.process()
    dies(lambda: batch(dead, pulled), Point("airflow_broadway.runs.sinks:Commits.commit", "after"))
    with closing(sqlite3.connect(FOLDER / "queue.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


if __name__ == "__main__":
    write()
