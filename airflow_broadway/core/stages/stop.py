"""When a run begins nothing more, and when it waits for nothing more.

A run ends by itself, by its budget of time, or because it is asked to.  In each case what has not
been begun goes back to its broker, and what is done counts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from airflow_broadway.core.clock import Clock

_NEVER: Final = float("inf")
#: Seconds for which a run waits at most without looking whether it is to stop.
STOP_CHECK_INTERVAL: Final = 0.5
#: Seconds between two looks at what ``asked`` says, while messages are handled.
_ASK_INTERVAL: Final = 0.05
#: Seconds for which a run whose time is over waits for processors that are at a message.
_LAST_MESSAGE_TIMEOUT: Final = 1.0


class Stop:
    """Whether a run is to stop, and until when it may finish what it is at.

    :param shutdown: Seconds that it has, once it is to stop, to finish what was handed out.
    :param asked: Asked often: why to stop now, or ``""``.
    :param interrupts: What ends a callback from outside, as a task's time-out does: the message at
        work goes back, and nothing more is begun.
    """

    def __init__(
        self,
        clock: Clock,
        shutdown: float = _NEVER,
        asked: Callable[[], str] | None = None,
        *,
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.shutdown = shutdown
        self.interrupts = interrupts
        #: Called once the run is to stop, perhaps in a signal handler.
        self.on_request: list[Callable[[], None]] = []
        #: The instant, by ``now``, from which on :meth:`enough` is worth asking: looking at it
        #: before each message costs less than the call.
        self.look_at = 0.0
        self.now = clock.monotonic
        self._asked = asked
        self._reason = ""
        self._until = _NEVER  # for messages
        self._late = _NEVER  # for everything

    def bound(self, seconds: float | None) -> None:
        """Begin no message after ``seconds`` from now; ``None``: no bound."""
        if seconds is not None:
            self._until = min(self._until, self.now() + seconds)
            self.look_at = min(self.look_at, self._until)

    def request(self, reason: str, *, at_once: bool = False) -> None:
        """Ask the run to stop; the first reason stands.  May be called from a signal handler.

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
        """Why the run is to stop, or ``""``."""
        if not self._reason and self._asked is not None:
            asked = self._asked()
            if asked:
                self.request(asked)
        return self._reason

    def enough(self) -> bool:
        """Whether no further message is begun."""
        self.reason()
        now = self.now()
        asks = self._asked is not None and not self._reason
        self.look_at = min(self._until, now + _ASK_INTERVAL) if asks else self._until
        return now >= self._until

    def late(self) -> bool:
        """Whether nothing more is begun or waited for: the time to finish is over."""
        self.reason()
        return self.now() >= self._late

    def over(self) -> bool:
        """Whether not even processors that are at a message are waited for any more."""
        self.reason()
        return self.now() >= self._late + _LAST_MESSAGE_TIMEOUT

    def left(self) -> float | None:
        """Seconds in which messages are begun; ``None``: no bound."""
        return None if self._until == _NEVER else max(0.0, self._until - self.now())

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Stop on SIGTERM, where signals can be handled: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda number, frame: self.request("stopped"))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
