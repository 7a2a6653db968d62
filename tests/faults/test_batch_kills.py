"""kill -9 of a Python batcher's task between each two of its calls: on a disk, and on S3.

Whatever has an outcome is never handled again; what has none is handled again, in the same batch;
and every message is settled once, by the outcome that stands.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.formats import record_batch as recording
from airflow_broadway.staging.store import Folder, Store
from tests.s3_server import S3Server, s3_server
from tests.unit.runs.steps import Run

pytestmark = pytest.mark.faults

COUNT = 35
#: What fails in the processor, and in the batches; four batches of ten hold the others.
DEAD = [n for n in range(COUNT) if n % 7 == 0 or n % 5 == 0]

#: The calls of a folder by which something is read or kept.
CALLS = ("create", "create_own", "exists", "list", "lines", "read", "sink", "source", "write_lines")


def made(folder: Path, store: Store | None = None) -> Run:
    """A run whose process task has ended; more of it is made by :func:`again`."""
    folder.mkdir()
    run = Run(folder, store=store)
    run.send(range(COUNT))
    return run


def outcomes(run: Run) -> set[str]:
    """The ids of the batches that have an outcome."""
    top = "outcomes/default"
    files = run.staged.files
    return {
        name.removesuffix(".json")
        for inputs in files.list(top)
        for name in files.list(f"{top}/{inputs}")
        if name.endswith(".json")
    }


def check(run: Run, reference: dict[str, Any]) -> None:
    """Ends a run whose batcher was killed, and checks what became of every message."""
    recorded, before = outcomes(run), len(run.calls())
    run.batch(reference, try_number=2)
    report = run.ack()

    assert report["balanced"], report
    assert report["totals"]["received"] == COUNT
    assert report["totals"]["dead_lettered"] == len(DEAD)
    assert report["totals"]["acked"] == COUNT - len(DEAD)
    assert run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))
    assert run.unmarked() == []
    first, second = run.calls()[:before], run.calls()[before:]
    # What had an outcome is not handled again, and nothing that was handled lacks one but what the
    # task was at: one batch.
    assert not recorded & {call.batch_id for call in second}
    assert len({call.batch_id for call in first} - recorded) <= 1
    handled = {call.number for call in run.calls()}
    assert handled == {n for n in range(COUNT) if n % 7}


def died(step: Callable[[], object]) -> bool:
    """Runs ``step`` in a child; whether it was killed, which it must do unless it succeeds."""
    child = os.fork()
    if not child:
        code = 1
        try:
            step()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.mark.parametrize("inline", [recording.INLINE_BYTES, 0], ids=["inline", "apart"])
def test_a_batcher_killed_before_any_disk_call_is_completed_by_the_next(
    tmp_path, monkeypatch, inline
):
    # Given exceptions that outcomes hold, or that have files of their own
    monkeypatch.setattr(recording, "INLINE_BYTES", inline)
    fatal, killed = 0, True
    while killed:
        # When the batcher's task dies before its first, its second, … call
        fatal += 1
        run = made(tmp_path / str(fatal))
        reference = run.process()
        killed = died(lambda: deadly(fatal, lambda: run.batch(reference)))  # noqa: B023
        # Then the next task completes it
        check(run, reference)
    assert fatal > 18


def deadly(fatal: int, step: Callable[[], object]) -> None:
    """Dies before the ``fatal``-th call that the step makes of the staging folder."""
    counted = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            nonlocal counted
            counted += 1
            if counted == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return call

    for name in CALLS:  # of a process that has nothing else to do
        setattr(Folder, name, watched(getattr(Folder, name)))
    step()


# ------------------------------------------------------------------------------------------- S3


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3_server() as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(900)  # a process for each request
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_batcher_killed_at_any_s3_request_is_completed_by_the_next(server, tmp_path, moment):
    """``after``: the request was carried out, and its response never read."""
    fatal, killed = 0, True
    while killed:
        fatal += 1
        root = server.root()
        run = made(tmp_path / str(fatal), server.store(root))
        reference = run.process()

        def batch(folder: Path = run.folder, root: str = root) -> None:
            # With a client of its own: none survives a fork.
            Run(folder, store=server.store(root)).batch(reference)  # noqa: B023

        with deadly_at(server, moment, fatal):
            killed = died(batch)
        check(run, reference)
    assert fatal > 21


def children() -> set[int]:
    """The processes that this one has begun."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


class deadly_at:  # noqa: N801 - used as a function
    """The server kills the child that is made in the block, at its ``fatal``-th request."""

    def __init__(self, server: S3Server, moment: str, fatal: int) -> None:
        self._server = server
        self._moment = moment
        self._left = fatal
        # Other tests may have left one, such as Spark's Java.
        self._others = children()

    def __enter__(self) -> None:
        self._server.told = self._told

    def __exit__(self, *_: object) -> None:
        self._server.told = lambda moment: None

    def _told(self, moment: str) -> None:
        if moment == self._moment:
            self._left -= 1
            if not self._left:
                [child] = children() - self._others
                os.kill(child, signal.SIGKILL)
