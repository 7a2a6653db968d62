"""The embedded queue once more, but a run handles the messages of a past interval again.

What is sent goes through a live run at once, in a process that nobody strikes, and into the
archive.  The runs that are struck, and those that recover, have the archive for their source until
each message was handled again; later ones have the live queue, which is empty.
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
from airflow_broadway.testing.crashes.sink import rows_of
from airflow_broadway.testing.crashes.subject import Letter
from tests.crashes.before import LiveBefore, live_run
from tests.crashes.subjects import MakeSubject

_DAY = datetime(2013, 1, 1, tzinfo=UTC)
_SOURCE = RunSource(kind=ARCHIVE, interval=Interval(_DAY, _DAY + timedelta(days=1)))


def _scheduled(message: Message) -> datetime:
    """The time of a message: six are in an hour."""
    return _DAY + timedelta(minutes=10 * int(message.data))


def over_backfills() -> AbstractContextManager[MakeSubject]:
    """Creates subjects whose runs have the archive as their source."""
    return nullcontext(_Backfills)


class _Backfills(LiveBefore):
    """A pipeline over an archive; failures are kept next to the archive."""

    lapses = False  # a run's messages of an archive cannot be taken over

    def __init__(self, pipeline: type[Broadway], folder: Path) -> None:
        kept = {"archive": Archive(time=_scheduled), "__module__": pipeline.__module__}
        super().__init__(type(pipeline.__name__, (pipeline,), kept), folder)
        self._sent: list[str] = []
        self._lives = 0
        #: Whether the run that is next is to handle the interval again.
        self._again = True

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        ids = super().send(bodies)
        live_run(self, f"live-{self._lives}", self.overrides)
        self._lives += 1
        self._sent += ids
        return ids

    def _source(self, run_id: str) -> RunSource:
        return _SOURCE if self._again else RunSource()

    def waiting(self) -> int:
        left = self._not_again()
        self._again = bool(left)  # it is asked before each run that drains
        return super().waiting() + len(left)

    def _not_again(self) -> set[str]:
        """The messages that neither succeeded again, nor are kept as failed again."""
        last = "handle_batch" if self.pipeline.batchers else "handle_message"
        done = {
            key
            for call in recorded_calls(self.calls_file)
            if call.stage == last
            for key in call.succeeded or ()
        }
        return {*self._sent} - done - {letter.message_id for letter in self.letters()}

    def letters(self) -> list[Letter]:
        """Repeated failures: another run of the interval adds them again, with a mark."""
        folder = self.work / "staging" / self.pipeline.__name__ / "_archive" / "_failed"
        lines = [
            json.loads(line)
            for path in sorted(folder.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return [Letter(letter["message_id"], True, letter["reason"]) for letter in lines]

    def rows(self, ids: Sequence[str]) -> Counter[str] | None:
        if not self.pipeline.defines("prepare_backfill"):
            return None
        return rows_of(_rows, self.work, self.folder / "log.txt", ids)


def _rows(folder: Path) -> list[int]:
    """Returns the rows that :class:`tests.crashes.pipelines.Refills` has written."""
    return [row for path in folder.glob("rows/*") for row in json.loads(path.read_text())]
