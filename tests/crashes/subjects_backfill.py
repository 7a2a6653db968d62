"""Backfills of an archive, over the embedded queue.

A live run without faults handles and archives the messages when they are sent.  The runs with
faults, and their recoveries, read the archive until all messages are handled again.  Later runs
read the live queue, which is empty.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow_broadway import Archive, Broadway, Message
from airflow_broadway.core.model.run_source import ARCHIVE, Interval, RunSource
from airflow_broadway.testing.crashes.callbacks import recorded_calls
from airflow_broadway.testing.crashes.sink import count_rows
from airflow_broadway.testing.crashes.subject import DeadLetter
from tests.crashes.live_runs import LiveBefore, live_run
from tests.crashes.subjects import MakeSubject

_DAY = datetime(2013, 1, 1, tzinfo=UTC)
_SOURCE = RunSource(kind=ARCHIVE, interval=Interval(_DAY, _DAY + timedelta(days=1)))


def _scheduled(message: Message) -> datetime:
    """Returns the time of a message: one every ten minutes."""
    return _DAY + timedelta(minutes=10 * int(message.data))


def open_subjects() -> AbstractContextManager[MakeSubject]:
    """Returns a context manager that yields the class of subjects with backfills."""
    return nullcontext(_Backfills)


class _Backfills(LiveBefore):
    """A pipeline over an archive; failed messages are recorded next to the archive."""

    lapses = False  # messages of an archive have no leases

    def __init__(self, pipeline: type[Broadway], folder: Path) -> None:
        attributes = {"archive": Archive(time=_scheduled), "__module__": pipeline.__module__}
        super().__init__(type(pipeline.__name__, (pipeline,), attributes), folder)
        self._sent: list[str] = []
        self._live_runs = 0
        #: Whether the next run reads the archive.
        self._reads_archive = True

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        ids = super().send(bodies)
        live_run(self, f"live-{self._live_runs}", self.overrides)
        self._live_runs += 1
        self._sent += ids
        return ids

    def _source(self, run_id: str) -> RunSource:
        return _SOURCE if self._reads_archive else RunSource()

    def waiting(self) -> int:
        unhandled = self._unhandled()
        self._reads_archive = bool(unhandled)  # called before each draining run
        return super().waiting() + len(unhandled)

    def _unhandled(self) -> set[str]:
        """Returns the messages that the backfills have neither handled nor recorded as failed."""
        last = "handle_batch" if self.pipeline.batchers else "handle_message"
        done = {
            key
            for call in recorded_calls(self.calls_file)
            if call.stage == last
            for key in call.succeeded or ()
        }
        return {*self._sent} - done - {letter.message_id for letter in self.letters()}

    def letters(self) -> list[DeadLetter]:
        """Returns the recorded failures; each backfill of the interval adds them again."""
        folder = self.work / "staging" / self.pipeline.__name__ / "_archive" / "_failed"
        lines = [
            json.loads(line)
            for path in sorted(folder.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return [DeadLetter(letter["message_id"], True, letter["reason"]) for letter in lines]

    def rows(self, ids: Sequence[str]) -> Counter[str] | None:
        if not self.pipeline.defines("prepare_backfill"):
            return None
        return count_rows(_rows, self.work, self.folder / "log.txt", ids)


def _rows(folder: Path) -> list[int]:
    """Returns the rows that :class:`tests.crashes.pipelines.Refills` has written."""
    return [row for path in folder.glob("rows/*") for row in json.loads(path.read_text())]
