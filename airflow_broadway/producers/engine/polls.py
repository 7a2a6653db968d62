"""Keeps receives in flight: several at a time, as many as the demand needs and no more.

The run's thread submits receives for what is wanted and collects their answers; a pool carries them
out.  Once a receive is empty, the others that wait are not made: while the queue is quiet one
receive is made in ``interval`` seconds, and when it finds something they go on.
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

#: Seconds that a receive may take beyond its long poll before the run's thread gives it up.
_RECEIVE_TIMEOUT: Final = 120.0
#: The same of a run that is to stop.
_STOPPING_TIMEOUT: Final = 1.0
#: Seconds between two looks at whether it is.
_STOP_CHECK_INTERVAL: Final = 0.2


class Polls:
    """Keeps receives in flight; :meth:`want` and :meth:`take` are for one thread.

    :param receive: Makes one receive of at most so many messages; called in any thread.
    :param late: Takes the messages that arrive after :meth:`close` has given up waiting; in any
        thread.
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
        #: Receives in flight, or waiting for a thread; and the messages that they ask for.
        self._flying = 0
        self._requested = 0
        #: Receives in flight that were made before the queue was quiet.
        self._early = 0
        self._answers: deque[Answer] = deque()
        self._quiet_until = 0.0
        self._quiet = False
        self._error: Exception | None = None
        self._closed = False
        #: Whether answers are taken no more.
        self._gone = False

    def want(self, demand: int) -> None:
        """Raises what is in flight or waiting to ``demand`` messages, in all."""
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
                self._pool.submit(keep_ids(self._poll), count, scout=self._quiet)

    def take(self, timeout: float) -> Answer | None:
        """Returns the next answer, waiting up to ``timeout`` seconds while receives are in flight.

        A run that is to stop does not wait.

        :raises Exception: The error of a receive, once all earlier answers are taken.
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
        """Whether the queue was empty, by every receive made until then."""
        with self._changed:
            return self._quiet and not self._early

    @property
    def pause(self) -> float:
        """Seconds until the next receive may be made."""
        with self._changed:
            return max(0.0, self._quiet_until - self._clock.monotonic())

    def close(self) -> list[Answer]:
        """Makes no more receives, lets those in flight end, and returns their answers.

        A receive that has not ended after two minutes, or after a second of a run that is to stop,
        is given up: its messages go to ``late``.
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

    def _poll(self, count: int, *, scout: bool) -> None:
        """Makes one receive, unless it has become useless.

        :param scout: Whether it is the only one, because the queue is quiet.
        """
        with self._changed:
            useless = self._closed or self._error is not None or (self._quiet and not scout)
            early = not useless and not self._quiet
            self._early += early
        answer = Answer(0.0, ())
        error: Exception | None = None
        try:
            if not useless:
                answer = self._receive(count)
        except Exception as raised:
            error = raised
        with self._changed:
            self._flying -= 1
            self._requested -= count
            self._early -= early
            gone = self._gone
            if error is not None:
                self._error = self._error or error
            elif answer.messages:
                self._quiet, self._quiet_until = False, 0.0
                if not gone:
                    self._answers.append(answer)
            elif not useless:
                self._quiet = True
                self._quiet_until = self._clock.monotonic() + self._interval
            self._changed.notify_all()
        if gone and answer.messages:
            self._late(answer.messages)
