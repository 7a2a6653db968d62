"""Keeps receives in flight: several at a time, and no more than the demand needs.

The run's thread states its demand and collects the answers.  Threads of a pool receive until the
demand is met, so that a broker that returns less than requested is asked again immediately; an
empty receive ends its thread.  While the queue is quiet, one receive is made every ``interval``
seconds, until one returns messages.
"""

from __future__ import annotations

import threading
import time
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
        #: Threads that receive, the messages that they request, and those not yet requested.
        self._flying = self._requested = self._missing = 0
        #: Receives in flight that were made before the queue was quiet.
        self._early = 0
        #: Answers, the messages in them, and those that :meth:`take` waits for.
        self._answers: list[Answer] = []
        self._waiting, self._needed = 0, 1
        self._quiet_until = 0.0
        self._quiet = False
        self._error: Exception | None = None
        self._closed = False
        #: Whether :meth:`close` has collected the answers.
        self._collected = False

    def want(self, demand: int) -> None:
        """Has threads receive until ``demand`` messages are in flight or waiting."""
        with self._changed:
            room = (1 if self._quiet else self._concurrency) - self._flying
            early = self._clock.monotonic() < self._quiet_until or (self._quiet and room <= 0)
            if early or self._closed or self._error is not None:
                return
            self._missing = demand - self._waiting - self._requested
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._concurrency, f"broadway-{self._name}-receive")
            for _ in range(min(room, -(-self._missing // self._most))):
                self._flying += 1
                self._pool.submit(keep_ids(self._poll))

    def take(self, timeout: float, count: int = 1) -> list[Answer]:
        """Returns the answers, waiting up to ``timeout`` seconds for ``count`` messages in them.

        It waits only while receives are in flight, and not if the run is stopping.

        :raises Exception: The error of a receive, after all earlier answers are returned.
        """
        end = time.monotonic() + min(timeout, _RECEIVE_TIMEOUT)
        with self._changed:
            self._needed = count
            while self._waiting < self._needed and self._flying and self._error is None:
                left = end - time.monotonic()
                if left <= 0 or self._hurry():
                    break
                self._changed.wait(min(left, _STOP_CHECK_INTERVAL))
            if self._answers or self._error is None:
                return self._empty()
            error, self._error = self._error, None
            raise error

    def _empty(self) -> list[Answer]:
        answers, self._answers, self._waiting = self._answers, [], 0
        return answers

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
            answers = self._empty()
            self._collected = True
        if self._pool is not None:
            self._pool.shutdown(wait=not self._flying)
            self._pool = None
        return answers

    def _poll(self) -> None:
        """Receives until no message is missing, or a receive is empty or fails."""
        ended = False
        while True:
            with self._changed:
                count = 0 if ended or self._closed else min(self._most, self._missing)
                if count <= 0:
                    self._flying -= 1
                    self._needed = 1  # the run's thread may want more threads
                    self._changed.notify_all()
                    return
                self._missing -= count
                self._requested += count
                early = not self._quiet
                self._early += early
            answer, error = Answer(0.0, ()), None
            try:
                answer = self._receive(count)
            except Exception as raised:
                error = raised
            with self._changed:
                self._requested -= count
                self._early -= early
                closed, ended = self._collected, not answer.messages
                # A failed receive cancels those behind it.
                self._missing = self._missing + count - len(answer.messages) if not error else 0
                if error is not None:
                    self._error = self._error or error
                elif ended:
                    self._quiet = True
                    self._quiet_until = self._clock.monotonic() + self._interval
                else:
                    self._quiet, self._quiet_until = False, 0.0
                    if not closed:
                        self._answers.append(answer)
                        self._waiting += len(answer.messages)
                        if self._waiting >= self._needed:  # a wake-up costs as much as ten messages
                            self._changed.notify_all()
            if closed and answer.messages:
                self._late(answer.messages)
