"""Runs work in a forked child process, which may crash."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.stages.child_safety import tie_to_parent

log = logging.getLogger(__name__)

#: Exit code of a process whose work raised.
_RAISED: Final = 1
#: Seconds between SIGTERM and SIGKILL.
_END_TIMEOUT: Final = 10.0
#: Maximum bytes of an error message from the child: a pipe writes as many atomically.
_MAX_ERROR_BYTES: Final = 4096


class ChildProcess:
    """A fork of this process that does some work and ends.

    It inherits connections and callbacks with their state.  So create it while no other thread of
    this process is active.

    :param work: The function to run; its result is ignored.
    :param stop: The handler of SIGTERM; by default the signal kills the child.
    """

    def __init__(
        self, work: Callable[[], object], stop: Callable[[], object] | None = None
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        #: The exception of its work, as text; known once it has ended.
        self.raised = ""
        self._error_read, error_write = os.pipe()
        # Its own children may outlive it and keep the other end open: do not wait for them.
        os.set_blocking(self._error_read, False)
        # A SIGTERM sent before the handler is installed stays pending until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            tie_to_parent(parent)
            # The host's own handler would detect another process and do nothing.
            signal.signal(signal.SIGTERM, (lambda *_: stop()) if stop else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _run_child(work, error_write)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(error_write)

    def stop(self) -> None:
        """Sends SIGTERM.  Called from a signal handler."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> str:
        """Waits until it ends; returns how it ended as text, empty on success."""
        try:
            _, status = os.waitpid(self._pid, 0)
        except BaseException:  # this process stops, so the child must
            self._end()
            raise
        code = os.waitstatus_to_exitcode(status)
        if code == _RAISED:
            with suppress(BlockingIOError):  # the work exited with that code itself
                self.raised = os.read(self._error_read, _MAX_ERROR_BYTES).decode(errors="replace")
        os.close(self._error_read)
        if code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}" if code else ""

    def finish(self) -> None:
        """Waits until it ends.

        :raises BroadwayError: If the work raised, or it was killed.
        """
        ending = self.wait()
        if ending:
            raise BroadwayError(self.raised or f"a child process ended: {ending}")

    def _end(self) -> None:
        """Sends SIGTERM, then SIGKILL after a timeout."""
        limit = time.monotonic() + _END_TIMEOUT
        os.close(self._error_read)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGTERM)
            while not os.waitpid(self._pid, os.WNOHANG)[0]:
                if time.monotonic() > limit:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    return
                time.sleep(0.05)


def _run_child(work: Callable[[], object], error_write: int) -> None:
    code = 0
    try:
        work()
    except BaseException as error:  # any exception: a child has no caller to raise to
        code = _RAISED
        log.exception("The work of a child process failed.")
        os.write(
            error_write,
            f"{type(error).__name__}: {error}".encode(errors="replace")[:_MAX_ERROR_BYTES],
        )
    finally:
        with suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
