"""Does work in a process of its own, which may die of it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from airflow_broadway.core.stages.child_safety import tie_to_parent

log = logging.getLogger(__name__)

#: Exit code of a process whose work raised.
_RAISED: Final = 1
#: Seconds that a process gets to end when it is told to.
_END_TIMEOUT: Final = 10.0
#: Bytes of what a process says of an error: a pipe takes as many at once.
_MOST_TOLD: Final = 4096


class Apart:
    """A copy of this process that does some work, and ends.

    It is a fork: connections, callbacks and what they have set up are there as they were.  So make
    it while no other thread of this process is at work.

    :param work: What it does; what that returns is lost.
    :param stop: What it does when it is told to stop; it is killed by that unless given.
    """

    def __init__(
        self, work: Callable[[], object], stop: Callable[[], object] | None = None
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        #: What its work raised, for people; known once it has ended.
        self.raised = ""
        self._told, tell = os.pipe()
        # Its own children may outlive it, and hold the other end: nobody waits for them.
        os.set_blocking(self._told, False)
        # Whoever stops it before it can listen waits until it does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            tie_to_parent(parent)
            # The host's own handler would take itself for that of another process, and do nothing.
            signal.signal(signal.SIGTERM, (lambda *_: stop()) if stop else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _be(work, tell)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(tell)

    def stop(self) -> None:
        """Tell it to stop.  Called from a signal handler."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> str:
        """Wait until it ends; how it did, for people, empty if in order."""
        try:
            _, status = os.waitpid(self._pid, 0)
        except BaseException:  # this process is to stop: so is the other
            self._end()
            raise
        code = os.waitstatus_to_exitcode(status)
        if code == _RAISED:
            with suppress(BlockingIOError):  # it ended by that code without a word
                self.raised = os.read(self._told, _MOST_TOLD).decode(errors="replace")
        os.close(self._told)
        if code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}" if code else ""

    def _end(self) -> None:
        """Tell it to end, and kill it if it does not."""
        limit = time.monotonic() + _END_TIMEOUT
        os.close(self._told)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGTERM)
            while not os.waitpid(self._pid, os.WNOHANG)[0]:
                if time.monotonic() > limit:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    return
                time.sleep(0.05)


def _be(work: Callable[[], object], tell: int) -> None:
    code = 0
    try:
        work()
    except BaseException as error:  # whatever it is: this process has nobody to raise it to
        code = _RAISED
        log.exception("What a process of its own was to do failed.")
        os.write(tell, f"{type(error).__name__}: {error}".encode(errors="replace")[:_MOST_TOLD])
    finally:
        with suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
