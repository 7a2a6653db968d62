"""Keeps receives in flight: several at a time, and no more than the demand needs.

The run's thread submits receives for its demand and collects their answers; a thread pool executes
them.  After an empty receive, pending receives are skipped.  While the queue is quiet, one receive
is made every ``interval`` seconds, until one returns messages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from airflow_broadway.core.log_context import keep_ids
from airflow_broadway.producers.engine.port import Answer, Broker, Received

#: Seconds that a receive may take beyond its long poll before the run's thread abandons it.
_RECEIVE_TIMEOUT: Final = 120.0
#: The same timeout for a run that is stopping.
_STOPPING_TIMEOUT: Final = 1.0
#: Seconds between two checks whether the run is stopping.
_STOP_CHECK_INTERVAL: Final = 0.2


class Polls:
    """Keeps receives in flight; :meth:`want` and :meth:`take` are for one thread.

    :param receive: Makes one receive of at most the given number of messages; called in any thread.
    :param late: Called in any thread with messages that arrive after :meth:`close` stopped waiting.
    """

    def __init__(
        self,
        broker: Broker[Any],
        receive: Callable[[int], Answer],
        late: Callable[[Sequence[Received]], None] = lambda messages: None,
    ) -> None:
        self._receive = receive
        self._late = late
        self._most, self._concurrency = broker.max_fetch, broker.concurrency
        self._interval, self._clock = broker.interval, broker.clock
        self._hurry = broker.env.stopping
        self._name = type(broker).__name__
        self._pool: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        #: Receives in flight or waiting for a thread, and the sum of their demands.
        self._flying = 0
        self._requested = 0
        #: Receives in flight that were submitted before the queue was quiet.
        self._early = 0
        self._answers: deque[Answer] = deque()
        self._quiet_until = 0.0
        self._quiet = False
        self._error: Exception | None = None
        #: The number of failed receives; a failure makes all receives submitted before it obsolete.
        self._failures = 0
        self._closed = False
        #: Whether :meth:`close` has stopped collecting answers.
        self._gone = False

    def want(self, demand: int) -> None:
        """Submits receives until ``demand`` messages are in flight or waiting."""
        with self._changed:
            waiting = sum(len(answer.messages) for answer in self._answers)
            missing = demand - waiting - self._requested
            if self._closed or self._error is not None or missing <= 0:
                return
            if self._clock.monotonic() < self._quiet_until or (self._quiet and self._flying):
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._concurrency, f"broadway-{self._name}-receive")
            while missing > 0:
                count = min(self._most, missing)
                missing = 0 if self._quiet else missing - count
                self._flying += 1
                self._requested += count
                self._pool.submit(
                    keep_ids(self._poll), count, scout=self._quiet, failures=self._failures
                )

    def take(self, timeout: float) -> Answer | None:
        """Returns the next answer, waiting up to ``timeout`` seconds while receives are in flight.

        A run that is stopping does not wait.

        :raises Exception: The error of a receive, after all earlier answers are returned.
        """
        end = time.monotonic() + min(timeout, _RECEIVE_TIMEOUT)
        with self._changed:
            while not self._answers and self._flying and self._error is None:
                left = end - time.monotonic()
                if left <= 0 or self._hurry():
                    return None
                self._changed.wait(min(left, _STOP_CHECK_INTERVAL))
            if self._answers:
                return self._answers.popleft()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return None

    @property
    def flying(self) -> bool:
        """Whether a receive is in flight."""
        with self._changed:
            return self._flying > 0

    @property
    def quiet(self) -> bool:
        """Whether the last receives, including all in flight, were empty."""
        with self._changed:
            return self._quiet and not self._early

    @property
    def pause(self) -> float:
        """Seconds until the next receive may be made."""
        with self._changed:
            return max(0.0, self._quiet_until - self._clock.monotonic())

    def close(self) -> list[Answer]:
        """Stops making receives, waits for those in flight, and returns their answers.

        A receive that has not ended after two minutes, or after one second if the run is stopping,
        is abandoned: its messages go to ``late``.
        """
        with self._changed:
            self._closed = True
            end = time.monotonic() + _RECEIVE_TIMEOUT
            hurried = False
            while self._flying:
                if not hurried and self._hurry():
                    hurried, end = True, min(end, time.monotonic() + _STOPPING_TIMEOUT)
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _STOP_CHECK_INTERVAL))
            answers = list(self._answers)
            self._answers.clear()
            self._gone = True
        if self._pool is not None:
            self._pool.shutdown(wait=not self._flying)
            self._pool = None
        return answers

    def _poll(self, count: int, *, scout: bool, failures: int) -> None:
        """Makes one receive, unless it has become obsolete.

        :param scout: Whether it is the single receive of a quiet queue.
        :param failures: The number of failed receives when it was submitted.
        """
        with self._changed:
            failed = failures != self._failures
            obsolete = self._closed or failed or (self._quiet and not scout)
            early = not obsolete and not self._quiet
            self._early += early
        answer = Answer(0.0, ())
        error: Exception | None = None
        try:
            if not obsolete:
                answer = self._receive(count)
        except Exception as raised:
            error = raised
        with self._changed:
            self._flying -= 1
            self._requested -= count
            self._early -= early
            closed = self._gone
            if error is not None:
                self._error = self._error or error
                self._failures += 1
            elif answer.messages:
                self._quiet, self._quiet_until = False, 0.0
                if not closed:
                    self._answers.append(answer)
            elif not obsolete:
                self._quiet = True
                self._quiet_until = self._clock.monotonic() + self._interval
            self._changed.notify_all()
        if closed and answer.messages:
            self._late(answer.messages)
