"""Receives in flight: several at a time, as many as the demand wants and no more.

Each thread asks for what is still wanted, again and again until a receive comes back empty.  The
run's thread collects what they found.  While the queue is quiet one of them asks, once in
``receive_interval`` seconds; when it finds something all of them go on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.log_context import keep_ids

__all__ = ["Answer", "Polls", "Received"]

#: Seconds that a receive may take beyond its long poll before the run's thread gives it up.
_RECEIVE_TIMEOUT: Final = 120.0
#: The same of a run that was told to stop.
_STOPPING_TIMEOUT: Final = 1.0
#: Seconds between two looks at whether it was.
_STOP_CHECK_INTERVAL: Final = 0.2


class Received(NamedTuple):
    """One message, as the broker handed it out.

    :param key: Its id, unique and the same at every delivery.
    :param receipt: What settles this delivery.
    :param raw: The client's own form of it.
    """

    key: str
    receipt: str
    raw: Any


class Answer(NamedTuple):
    """What one receive found.

    :param at: From then on its messages are held, at the latest: e.g. when it was asked.
    """

    at: float
    messages: Sequence[Received]


class Polls:
    """Keeps receives in flight; :meth:`want` and :meth:`take` are for one thread.

    :param receive: Makes one receive of at most so many messages; called in any thread.
    :param most: Messages in one receive, at most.
    :param concurrency: Receives at a time.
    :param interval: Seconds from an empty receive to the next.
    :param late: Takes what is found after :meth:`close` has given up waiting; in any thread.
    :param hurry: Whether to wait for none of them any more.
    :param name: For the names of threads.
    """

    def __init__(
        self,
        receive: Callable[[int], Answer],
        *,
        most: int,
        concurrency: int,
        interval: float,
        clock: Clock,
        late: Callable[[Sequence[Received]], None] = lambda found: None,
        hurry: Callable[[], bool] = lambda: False,
        name: str,
    ) -> None:
        self._receive = receive
        self._most = most
        self._concurrency = concurrency
        self._interval = interval
        self._clock = clock
        self._late = late
        self._hurry = hurry
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._credit = 0
        self._flying = 0
        self._asked = 0
        self._answers: deque[Answer] = deque()
        self._waiting = 0
        self._quiet_until = 0.0
        self._quiet = False
        self._error: Exception | None = None
        self._closed = False
        #: Whether nobody takes answers any more.
        self._gone = False
        #: Receives in flight that were made before the queue was found quiet.
        self._early = 0

    def want(self, demand: int) -> None:
        """Let ``demand`` messages be in flight or waiting, in all."""
        with self._changed:
            self._credit = demand - self._waiting - self._asked
            if self._closed or self._error is not None or self._credit <= 0:
                return
            if self._clock.monotonic() < self._quiet_until:
                return
            # One asks whether it is still quiet; the others follow once it is not.
            room = (1 if self._quiet else self._concurrency) - self._flying
            wanted = min(room, -(-self._credit // self._most))
            if wanted > 0:
                self._start(wanted)

    def take(self, timeout: float) -> Answer | None:
        """The next answer, waiting up to ``timeout`` seconds while receives are in flight.

        In a hurry it does not wait.

        :raises Exception: What a receive raised, once all that was found before is taken.
        """
        end = time.monotonic() + min(timeout, _RECEIVE_TIMEOUT)
        with self._changed:
            while not self._answers and self._flying and self._error is None:
                left = end - time.monotonic()
                if left <= 0 or self._hurry():
                    return None
                self._changed.wait(min(left, _STOP_CHECK_INTERVAL))
            if self._answers:
                answer = self._answers.popleft()
                self._waiting -= len(answer.messages)
                return answer
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
        """Whether the queue was found empty, by every receive made until then."""
        with self._changed:
            return self._quiet and not self._early

    @property
    def pause(self) -> float:
        """Seconds until the next receive may be made."""
        with self._changed:
            return max(0.0, self._quiet_until - self._clock.monotonic())

    def close(self) -> list[Answer]:
        """Make no more receives, let those in flight end, and return what they found.

        What has not ended after two minutes, or in a hurry after a second, is given up: what it
        finds goes to ``late``.
        """
        with self._changed:
            self._closed = True
            self._credit = 0
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
            self._waiting = 0
            self._gone = True
        if self._pool is not None:
            self._pool.shutdown(wait=not self._flying)
            self._pool = None
        return answers

    def _start(self, count: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._concurrency, f"broadway-{self._name}-receive")
        self._flying += count
        for _ in range(count):
            self._pool.submit(keep_ids(self._work), scout=self._quiet)

    def _work(self, *, scout: bool) -> None:
        """Ask until nothing is found or wanted.

        :param scout: Whether it asks for all, because the queue is quiet.
        """
        goes_on = True
        while goes_on:
            with self._changed:
                asked = self._claim(scout=scout)
                if not asked:
                    self._end()
                    return
                early = not self._quiet
                self._early += early
            answer = Answer(0.0, ())
            error: Exception | None = None
            try:
                answer = self._receive(asked)
            except Exception as raised:
                error = raised
            with self._changed:
                gone = self._gone
                self._asked -= asked
                self._early -= early
                self._take_in(answer, asked, error)
                goes_on = error is None and bool(answer.messages)
                if goes_on:
                    self._changed.notify_all()
                else:
                    self._end()
            if gone and answer.messages:
                self._late(answer.messages)

    def _claim(self, *, scout: bool) -> int:
        """How many messages to ask for now; 0: none."""
        asked = min(self._most, self._credit)
        in_vain = self._quiet and not scout  # found while this one started
        if asked <= 0 or in_vain or self._closed or self._error is not None:
            return 0
        self._credit -= asked
        self._asked += asked
        return asked

    def _take_in(self, answer: Answer, asked: int, error: Exception | None) -> None:
        """Keep what a receive found, for whoever takes it, and learn whether the queue is quiet."""
        found = answer.messages
        if error is not None:
            self._error = self._error or error
        elif found:
            self._credit += asked - len(found)
            if not self._gone:
                self._waiting += len(found)
                self._answers.append(answer)
            self._quiet, self._quiet_until = False, 0.0
        else:
            self._credit += asked
            self._quiet = True
            self._quiet_until = self._clock.monotonic() + self._interval

    def _end(self) -> None:
        self._flying -= 1
        self._changed.notify_all()
