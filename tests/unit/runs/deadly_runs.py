"""Runs of a pipeline of :mod:`tests.unit.runs.deadly`, whose process tasks are real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from airflow_broadway.staging.crash_records import load_crash_history
from tests.unit.runs.deadly import Deadly
from tests.unit.runs.steps import Run


def forked(work: Any) -> int:
    """Starts work in a child process that leads its group; returns the pid."""
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            # Airflow's Dag importer, which other tests call in this process, leaves its handler
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    with suppress(OSError):  # it may have done so itself, or be over
        os.setpgid(child, child)
    return child


def ending_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Runs:
    """Successive runs of one Dag without retries."""

    def __init__(
        self, folder: Path, kind: type[Deadly] = Deadly, *, numbers: Sequence[int], **options: Any
    ) -> None:
        self.folder, self.kind, self.options = folder, kind, options
        self.run_ids: list[str] = []
        self.last = Run(folder, "manual__0", pipeline=kind, numbers=numbers, **options)

    def next(self) -> Run:
        self.last = Run(
            self.folder,
            f"manual__{len(self.run_ids) + 1}",
            pipeline=self.kind,
            finished=list(self.run_ids),
            **self.options,
        )
        self.run_ids.append(self.last.run_id)
        return self.last

    def one(self, before: Callable[[], object] = lambda: None) -> int:
        """A whole run; returns how its process task ended.

        :param before: Called in that process first.
        """
        run = self.next()
        reference = self.folder / "reference.json"
        reference.unlink(missing_ok=True)

        def work() -> None:
            before()
            reference.write_text(json.dumps(run.process()))

        ending = ending_of(forked(work))
        if reference.exists():
            run.batch(json.loads(reference.read_text()))
        run.ack()
        return ending

    def history(self) -> Any:
        run = self.last.staged
        return load_crash_history(run.store, run.pipeline, run.clock.now())


def dead_reasons(run: Run) -> dict[int, str]:
    with run.queue() as queue:
        return {int(letter.body): letter.reason for letter in queue.dead_letters(limit=None)}
