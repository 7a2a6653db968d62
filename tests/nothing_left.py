"""Programs that start Airflows and brokers end them however they end themselves.

``with nothing_left_behind():`` around all of a program.  SIGTERM, SIGHUP and (on Linux) the death
of the parent become ``SystemExit``, so that whatever is a context manager ends in order.  What then
still runs, or runs on after a ``kill -9``, is killed by a second process: it holds one end of a
pipe, and knows what was started by a token in its environment, whose child it may be by now.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from scripts.airflow_env import ROOT
from scripts.local_airflow import kill_by_token

#: Carried by every process that was started inside.
VARIABLE = "BROADWAY_PROGRAM"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """See the module; of the main thread."""
    token = secrets.token_hex(16)
    end, held = os.pipe()
    watcher = subprocess.Popen(
        [sys.executable, "-m", __name__, token],
        stdin=end,
        cwd=ROOT,
        # A signal to this program's group is none for it.
        start_new_session=True,
    )
    os.close(end)
    os.environ[VARIABLE] = token
    before = {number: signal.signal(number, _ended) for number in _SIGNALS}
    _follow_parent()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        del os.environ[VARIABLE]
        os.close(held)
        watcher.wait()


def _ended(number: int, frame: FrameType | None) -> None:
    # Once: what ends in order must not be interrupted by the same signal again.
    for item in _SIGNALS:
        signal.signal(item, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _follow_parent() -> None:
    """Get SIGTERM when the parent dies, where the system can say so."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    """Wait until the program has ended, however it did; then end what it left behind."""
    sys.stdin.buffer.read()
    # Erlang's port mapper is one for all nodes of a machine, whoever happened to start it.
    kill_by_token(sys.argv[1], variable=VARIABLE, spared=("epmd",))


if __name__ == "__main__":
    main()
