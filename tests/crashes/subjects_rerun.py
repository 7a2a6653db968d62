"""Reruns of a past run's batches, over the embedded queue.

A live run without faults handles the messages when they are sent.  The runs with faults, and their
recoveries, read that run's batches until all are handled again.  Later runs read the live queue,
which is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from airflow_broadway import Broadway
from airflow_broadway.core.model.run_source import RUN, RunSource
from airflow_broadway.testing.crashes.callbacks import recorded_calls
from tests.crashes.live_runs import LiveBefore, live_run
from tests.crashes.subjects import MakeSubject


def open_subjects() -> AbstractContextManager[MakeSubject]:
    """Returns a context manager that yields the class of subjects with reruns."""
    return nullcontext(_PastRuns)


class _PastRuns(LiveBefore):
    """A pipeline over the batches of past runs."""

    lapses = False  # batches of a past run have no leases
    salt = "past"  # plans are sorted by ids, which must be the same in every case

    def __init__(self, pipeline: type[Broadway], folder: Path) -> None:
        super().__init__(pipeline, folder)
        #: The messages of each past run.
        self._past: dict[str, list[str]] = {}

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        ids = super().send(bodies)
        name = f"past-{len(self._past)}"
        live_run(self, name, self.overrides)
        self._past[name] = ids
        return ids

    def _source(self, run_id: str) -> RunSource:
        """Returns the first past run with unhandled messages; the same in every try of a run."""
        source_file = self.folder / f"source-{run_id}"
        with suppress(FileExistsError), source_file.open("x") as file:
            unhandled = self._unhandled()
            file.write(next((name for name, ids in self._past.items() if unhandled & {*ids}), ""))
        past = source_file.read_text()
        return RunSource(kind=RUN, run_id=past) if past else RunSource()

    def _unhandled(self) -> set[str]:
        """Returns the messages of past runs that were not handled again."""
        done = {
            key
            for call in recorded_calls(self.calls_file)
            if call.stage == "handle_batch"
            for key in call.succeeded or ()
        }
        dead = {letter.message_id for letter in self.letters()}
        return {key for ids in self._past.values() for key in ids} - done - dead

    def waiting(self) -> int:
        return super().waiting() + len(self._unhandled())
