"""When a run begins nothing more, and when it stops waiting.

A run ends by itself, by its time budget, or on request.  In each case messages that were not begun
are released, and completed ones keep their results.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from airflow_broadway.core.clock import Clock

_NEVER: Final = float("inf")
#: The maximum seconds of a wait without a check for a stop.
STOP_CHECK_INTERVAL: Final = 0.5
#: Seconds between two calls of ``poll_reason``, while messages are handled.
_POLL_INTERVAL: Final = 0.05
#: Seconds for which a run whose time is over waits for processors that are handling a message.
_LAST_MESSAGE_TIMEOUT: Final = 1.0


class Stop:
    """Whether a run is to stop, and how long it may take to finish.

    :param shutdown: Seconds that it has, after a stop request, to finish what was handed out.
    :param poll_reason: Called often; returns the reason to stop now, or ``""``.
    :param interrupts: Exceptions that end a callback from outside, such as a task's timeout: its
        message is released, and nothing more is begun.
    """

    def __init__(
        self,
        clock: Clock,
        shutdown: float = _NEVER,
        poll_reason: Callable[[], str] | None = None,
        *,
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.shutdown = shutdown
        self.interrupts = interrupts
        #: Called when the run is to stop, perhaps in a signal handler.
        self.on_request: list[Callable[[], None]] = []
        #: The time, by ``now``, from which on :meth:`enough` must be called: comparing it before
        #: each message is cheaper than the call.
        self.look_at = 0.0
        self.now = clock.monotonic
        self._poll_reason = poll_reason
        self._reason = ""
        self._until = _NEVER  # begins no message after this time
        self._late = _NEVER  # begins nothing after this time

    def bound(self, seconds: float | None) -> None:
        """Begins no message after ``seconds`` from now; ``None``: no limit."""
        if seconds is not None:
            self._until = min(self._until, self.now() + seconds)
            self.look_at = min(self.look_at, self._until)

    def request(self, reason: str, *, at_once: bool = False) -> None:
        """Requests a stop; the first reason is kept.  May be called from a signal handler.

        :param at_once: Leave no time to finish.
        """
        if self._reason:
            return
        self._reason = reason
        self._late = self.now() + (0.0 if at_once else self.shutdown)
        self._until = self.look_at = min(self._until, self._late)
        for call in self.on_request:
            call()

    def reason(self) -> str:
        """Returns why the run is to stop, or ``""``."""
        if not self._reason and self._poll_reason is not None:
            reason = self._poll_reason()
            if reason:
                self.request(reason)
        return self._reason

    def enough(self) -> bool:
        """Returns whether no further message is begun."""
        self.reason()
        now = self.now()
        polls = self._poll_reason is not None and not self._reason
        self.look_at = min(self._until, now + _POLL_INTERVAL) if polls else self._until
        return now >= self._until

    def late(self) -> bool:
        """Returns whether nothing more is begun or waited for: the time to finish is over."""
        self.reason()
        return self.now() >= self._late

    def over(self) -> bool:
        """Returns whether not even processors that are handling a message are waited for."""
        self.reason()
        return self.now() >= self._late + _LAST_MESSAGE_TIMEOUT

    def left(self) -> float | None:
        """Returns the seconds in which messages are begun; ``None``: no limit."""
        return None if self._until == _NEVER else max(0.0, self._until - self.now())

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Stops on SIGTERM, if signals can be handled: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, lambda number, frame: self.request("stopped"))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
