"""Receives in flight: several at a time, as many as the demand wants and no more.

Each thread asks for what is still wanted, again and again until a receive comes back empty.  The
run's thread collects what they found.  While the queue is quiet one of them asks, once in
``receive_interval`` seconds; when it finds something all of them go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.producers.sqs.reading import request_of

if TYPE_CHECKING:
    from airflow_broadway.producers.sqs.client import Queue
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["Answer", "Polls", "Receives"]

log = logging.getLogger(__name__)

#: What a message is known and held by.
_KEYS: Final = ("MessageId", "ReceiptHandle")
_SPAN: Final = "sqs.receive_messages"
_EVENTS: Final = tuple(f"{_SPAN}.{end}" for end in ("start", "stop", "exception"))
#: Seconds that a receive may take beyond its long poll before the run's thread gives it up.
_RECEIVE_TIMEOUT: Final = 120.0
#: The same of a run that was told to stop.
_STOPPING_TIMEOUT: Final = 1.0
#: Seconds between two looks at whether it was.
_STOP_CHECK_INTERVAL: Final = 0.2


class Answer(NamedTuple):
    """What one receive found.

    :param at: When it was asked: from then on its messages are hidden, at the latest.
    """

    at: float
    messages: Sequence[Mapping[str, Any]]


class Polls:
    """Keeps receives in flight; :meth:`want` and :meth:`take` are for one thread.

    :param receive: Makes one receive of at most so many messages; called in any thread.
    :param most: Messages in one receive, at most.
    :param concurrency: Receives at a time.
    :param interval: Seconds from an empty receive to the next.
    :param late: Takes what is found after :meth:`close` has given up waiting; in any thread.
    :param hurry: Whether to wait for none of them any more.
    """

    def __init__(
        self,
        receive: Callable[[int], Sequence[Mapping[str, Any]]],
        *,
        most: int,
        concurrency: int,
        interval: float,
        clock: Clock,
        late: Callable[[Sequence[Mapping[str, Any]]], None] = lambda found: None,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        self._receive = receive
        self._most = most
        self._concurrency = concurrency
        self._interval = interval
        self._clock = clock
        self._late = late
        self._hurry = hurry
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
            self._pool = ThreadPoolExecutor(self._concurrency, "broadway-sqs-receive")
        self._flying += count
        for _ in range(count):
            self._pool.submit(self._work, scout=self._quiet)

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
            at = self._clock.now().timestamp()
            found: Sequence[Mapping[str, Any]] = ()
            error: Exception | None = None
            try:
                found = self._receive(asked)
            except Exception as raised:
                error = raised
            with self._changed:
                gone = self._gone
                self._asked -= asked
                self._early -= early
                self._take_in(Answer(at, found), asked, error)
                goes_on = error is None and bool(found)
                if goes_on:
                    self._changed.notify_all()
                else:
                    self._end()
            if gone and found:
                self._late(found)

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


class Receives:
    """Makes the receives of one run.

    :param pipeline: Its name, for the spans.
    """

    def __init__(self, producer: SqsOptions, queue: Queue, pipeline: str, clock: Clock) -> None:
        self._producer = producer
        self._queue = queue
        self._pipeline = pipeline
        self._clock = clock
        #: Of a FIFO queue, those whose answer was lost: asked again, they get that answer.
        self._unanswered: deque[dict[str, Any]] = deque()

    def receive(self, count: int) -> list[dict[str, Any]]:
        """At most ``count`` messages, as SQS gives them, each with what it is held by.

        :raises ProducerError: If SQS refuses.
        :raises ProducerUnavailable: If it cannot be reached.
        """
        request = request_of(self._producer, count)
        if self._unanswered:
            with suppress(IndexError):  # another thread was faster
                request = self._unanswered.popleft()
        if not telemetry.handlers(*_EVENTS):
            return self._asked(request)
        span = telemetry.Span(_SPAN, {"name": self._pipeline, "demand": count})
        try:
            found = self._asked(request)
        except Exception as error:
            span.exception("error", error, "")
            raise
        span.stop({"name": self._pipeline, "demand": count, "messages": found})
        return found

    def lost(self) -> list[tuple[float, dict[str, Any]]]:
        """What the lost answers held, each with when it was asked for anew.

        Its groups would be blocked for a lease.  What is still out of reach comes back by itself.
        """
        messages: list[tuple[float, dict[str, Any]]] = []
        with suppress(BroadwayError):
            while self._unanswered:
                at = self._clock.now().timestamp()
                messages += [(at, raw) for raw in self._asked(self._unanswered.popleft())]
        return messages

    def _asked(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            found = self._queue.receive(request)
        except ProducerUnavailable:
            if self._producer.fifo:  # it may have been carried out: its groups would be blocked
                self._unanswered.append(request)
            raise
        return [raw for raw in found if self._is_whole(raw)]

    def _is_whole(self, raw: Any) -> bool:
        """Whether a message has what it is known and held by."""
        if all(isinstance(raw.get(name), str) and raw[name] for name in _KEYS):
            return True
        log.error(
            "a message of the SQS queue %r came without %s: it cannot be held, and comes again",
            self._queue.name,
            " or ".join(name for name in _KEYS if not raw.get(name)),
        )
        return False
