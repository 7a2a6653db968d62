"""The embedded queue once more, but a run handles the batches of a past run again.

What is sent goes through a live run at once, in a process that nobody strikes.  The runs that are
struck, and those that recover, have that one for their source until each of its batches was handled
again; later ones have the live queue, which is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from airflow_broadway import Broadway
from airflow_broadway.core.model.run_source import RUN, RunSource
from airflow_broadway.testing.crashes.callbacks import recorded_calls
from tests.crashes.before import LiveBefore, live_run
from tests.crashes.subjects import MakeSubject


def over_past_runs() -> AbstractContextManager[MakeSubject]:
    """Creates subjects whose runs have a past run as their source."""
    return nullcontext(_PastRuns)


class _PastRuns(LiveBefore):
    """A pipeline over the batches of past runs."""

    lapses = False  # each run has the batches for itself
    salt = "past"  # folders of plans are sorted by what is made of ids: no case is to differ

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
        """The first past run of which something was not handled again; the same in each try."""
        noted = self.folder / f"source-{run_id}"
        with suppress(FileExistsError), noted.open("x") as file:
            left = self._not_again()
            file.write(next((name for name, ids in self._past.items() if left & {*ids}), ""))
        past = noted.read_text()
        return RunSource(kind=RUN, run_id=past) if past else RunSource()

    def _not_again(self) -> set[str]:
        """The messages that were in a batch of a past run, and were not handled again."""
        done = {
            key
            for call in recorded_calls(self.calls_file)
            if call.stage == "handle_batch"
            for key in call.succeeded or ()
        }
        dead = {letter.message_id for letter in self.letters()}
        return {key for ids in self._past.values() for key in ids} - done - dead

    def waiting(self) -> int:
        return super().waiting() + len(self._not_again())
