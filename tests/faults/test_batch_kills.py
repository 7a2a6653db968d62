"""Kills a Python batcher's task before each of its file or S3 calls.

A batch with an outcome is not handled again.  A batch without one is handled again unchanged.
Every message is settled once, by its recorded outcome.
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
#: Messages that fail in the processor or in a batch; four batches of ten hold the others.
DEAD = [n for n in range(COUNT) if n % 7 == 0 or n % 5 == 0]

#: The methods of a folder that read or write.
CALLS = ("create", "create_own", "exists", "list", "lines", "read", "sink", "source", "write_lines")


def make_run(folder: Path, store: Store | None = None) -> Run:
    """Creates a run and sends its messages."""
    folder.mkdir()
    run = Run(folder, store=store)
    run.send(range(COUNT))
    return run


def outcomes(run: Run) -> set[str]:
    """Returns the ids of the batches that have an outcome."""
    top = "outcomes/default"
    files = run.staged.files
    return {
        name.removesuffix(".json")
        for inputs in files.list(top)
        for name in files.list(f"{top}/{inputs}")
        if name.endswith(".json")
    }


def check(run: Run, reference: dict[str, Any]) -> None:
    """Completes a run whose batcher was killed, and checks the state of every message."""
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
    # No batch with an outcome is handled again.  At most one handled batch has no outcome: the one
    # during which the task was killed.
    assert not recorded & {call.batch_id for call in second}
    assert len({call.batch_id for call in first} - recorded) <= 1
    handled = {call.number for call in run.calls()}
    assert handled == {n for n in range(COUNT) if n % 7}


def run_and_check_killed(step: Callable[[], object]) -> bool:
    """Runs ``step`` in a child process; returns whether that was killed.

    A child that is not killed must succeed.
    """
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
    # Given exceptions that are stored in outcomes, or in separate files
    monkeypatch.setattr(recording, "INLINE_BYTES", inline)
    fatal, killed = 0, True
    while killed:
        # When the batcher's task dies before its first, its second, … call
        fatal += 1
        run = make_run(tmp_path / str(fatal))
        reference = run.process()
        killed = run_and_check_killed(lambda: kill_before_call(fatal, lambda: run.batch(reference)))  # noqa: B023
        # Then the next task completes it
        check(run, reference)
    assert fatal > 18


def kill_before_call(fatal: int, step: Callable[[], object]) -> None:
    """Runs ``step``; kills this process before its ``fatal``-th call of the staging folder."""
    calls = 0

    def count_calls(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in CALLS:  # never undone: the process ends after the step
        setattr(Folder, name, count_calls(getattr(Folder, name)))
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
    """``after``: the server executed the request, but the client did not read the response."""
    fatal, killed = 0, True
    while killed:
        fatal += 1
        root = server.root()
        run = make_run(tmp_path / str(fatal), server.store(root))
        reference = run.process()

        def batch(folder: Path = run.folder, root: str = root) -> None:
            # With a new client: S3 clients do not survive a fork.
            Run(folder, store=server.store(root)).batch(reference)  # noqa: B023

        with kill_at_request(server, moment, fatal):
            killed = run_and_check_killed(batch)
        check(run, reference)
    assert fatal > 21


def children() -> set[int]:
    """Returns the pids of this process's children."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


class kill_at_request:  # noqa: N801 - used as a function
    """Lets the server kill the child that the block starts, at its ``fatal``-th request."""

    def __init__(self, server: S3Server, moment: str, fatal: int) -> None:
        self._server = server
        self._moment = moment
        self._remaining = fatal
        # Other tests may have left children, such as Spark's JVM.
        self._others = children()

    def __enter__(self) -> None:
        self._server.on_request = self._on_request

    def __exit__(self, *_: object) -> None:
        self._server.on_request = lambda moment: None

    def _on_request(self, moment: str) -> None:
        if moment == self._moment:
            self._remaining -= 1
            if not self._remaining:
                [child] = children() - self._others
                os.kill(child, signal.SIGKILL)
