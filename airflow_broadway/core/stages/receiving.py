"""Receives messages from a source within a budget, and secures them.

The order is the protocol's: a message is secured before any user code handles it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Source
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.run_source import LIVE
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.text import pluralize

log = logging.getLogger(__name__)

#: The maximum seconds of one receive, so that a stop is noticed in time.
_RECEIVE_TIMEOUT = 1.0

#: The minimum seconds of a wait: less is a rounding error of floats.
_LEAST_TIMEOUT = 1e-6

#: Seconds by which a broker's clock may be ahead; later timestamps are invalid.
_CLOCK_SKEW = 3600.0

#: A receive requests as many messages as are handled in this many seconds, ...
_SECONDS_PER_RECEIVE = 0.5
#: ... at most this many times the previous request, ...
_MAX_GROWTH = 4
#: ... and at most this many, unless the processors can take more together, ...
_MAX_DEMAND = 1000
#: ... or the producer allows more: then at most this many bytes, by the size of the last messages.
_MAX_DEMAND_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of a run's receiving.

    :param max_messages: Stop after this many messages; ``None``: no limit.
    :param max_bytes: Stop once payloads of this many bytes were received.
    :param max_seconds: Stop after this long, even if messages remain.
    :param wait_seconds: How long to wait for the first message.
    :param idle_seconds: Stop after this long without a message, once there was one.
    """

    max_messages: int | None = None
    max_bytes: int | None = None
    max_seconds: float | None = None
    wait_seconds: float = 0.0
    idle_seconds: float = 0.0


def demand_of(pipeline: Pipeline) -> int:
    """Returns the number of messages that the processors of ``pipeline`` can take together."""
    options = pipeline.processors
    demand: int = options.concurrency * options.max_demand
    return demand


def enqueued_of(pipeline: Pipeline) -> Callable[[Message], datetime | None] | None:
    """Returns the function for a message's enqueue time at its broker; ``None`` for a run whose
    messages have not waited there: those of an archive, or of a past run.
    """
    return pipeline.producer.enqueued_at if pipeline.run.source.kind == LIVE else None


def check_messages(messages: Sequence[Any]) -> None:
    """Checks that a source returned messages.

    :raises PipelineError: If an item is not a message.
    """
    for message in messages:
        if type(message) is not Message:
            raise PipelineError(
                f"a producer must emit messages, got: {message!r:.200}", code="producer_crash"
            )


@dataclass(eq=False)
class Receiving:
    """Iterates over dispatches: messages for the processors, or an empty list after a pause.

    Requests as many messages as are handled in half a second, so that many fast messages share a
    broker's round trip, and few slow messages are received in vain.  Hands out ``demand`` messages
    at a time: on a stop, messages that are not handed out are released.

    :param demand: The number of messages that all processors together can take.
    :param most: The maximum request, if messages are small and handled fast.
    :param accept: Called with secured messages; returns those to hand out.
    :param next_timeout: Called before each wait; returns the seconds until a dispatch is due, be it
        an empty one; ``None``: no limit.
    :param stop_reason: Returns the reason to stop, or ``""``.
    :param enqueued_at: Returns a message's enqueue time at its broker, if known.
    """

    source: Source
    budget: Budget
    _: KW_ONLY
    clock: Clock
    limiter: RateLimiter
    demand: int
    most: int = _MAX_DEMAND
    accept: Callable[[Sequence[Message]], Sequence[Message]] = lambda messages: messages
    next_timeout: Callable[[], float | None] = lambda: None
    stop_reason: Callable[[], str] = lambda: ""
    enqueued_at: Callable[[Message], datetime | None] | None = None

    #: The number of receives.
    receives: int = field(default=0, init=False)
    received: int = field(default=0, init=False)
    received_bytes: int = field(default=0, init=False)
    #: Seconds spent in receiving and securing.
    seconds: float = field(default=0.0, init=False)
    #: The longest time in seconds that a message had waited at its broker; ``None``: unknown.
    waited: float | None = field(default=None, init=False)
    #: Whether messages are between the source and the queue here: an interruption meanwhile leaves
    #: them unaccounted.
    under_way: bool = field(default=False, init=False)
    #: Why it ended: ``empty``, ``max_messages``, ``max_bytes``, ``max_seconds``, ``rate_limiting``,
    #: ``error``, or the result of ``stop_reason``.
    ended: str = field(default="", init=False)
    #: The error that ended it: the source returned something other than messages.
    error: PipelineError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._next_demand = self.demand
        self._started = 0.0
        self._waiting: list[Message] = []  # received, and not yet handed out
        self._stopped = False

    @property
    def lag(self) -> dict[str, float]:
        """:attr:`waited` among the seconds of a run, if known."""
        return {} if self.waited is None else {"waited": round(self.waited, 3)}

    def __iter__(self) -> Iterator[list[Message]]:
        self._started = self.clock.monotonic()
        yield from self._dispatches()
        if self.ended in ("empty", "max_messages", "max_bytes", "rate_limiting"):
            self._stop_source()
            most = len(self._waiting)
            limited = self.ended == "rate_limiting"
            yield from self._hand_out(self.limiter.take(most) if limited else most)

    def stop(self) -> Sequence[Message]:
        """Stops the source; returns the messages that were received but never handed out.

        Called when the run ends, however it does, before its lease is recorded.  Safe to repeat.
        """
        self._stop_source()
        return list(self._waiting)

    def _stop_source(self) -> None:
        """Stops the source, and takes the messages that it had secured."""
        if not self._stopped:
            self._stopped = True
            self._collect(self.source.stop)

    def _dispatches(self) -> Iterator[list[Message]]:
        clock, budget = self.clock, self.budget
        quiet_since: float | None = None
        while True:
            now = clock.monotonic()
            demand = self._wanted(now)
            if not demand:
                return
            granted = self.limiter.take(demand)
            if not granted:
                pause, seconds = self.limiter.wait_seconds(), budget.max_seconds
                # It must grant something before the time is over.
                if seconds is None or now + pause >= self._started + seconds:
                    self.ended = "rate_limiting"
                    return
                clock.sleep(self._timeout(now, pause))
                yield []
                continue
            if quiet_since is None:
                quiet_since = now
            quiet = budget.idle_seconds if self.received else budget.wait_seconds
            size = self.received_bytes
            messages = self._receive(granted, self._timeout(now, quiet_since + quiet - now))
            if messages:
                quiet_since = None
                began = clock.monotonic()
                yield from self._hand_out()
                if self.ended:
                    return
                size = self.received_bytes - size
                self._adapt(len(messages), size, clock.monotonic() - began)
            elif clock.monotonic() - quiet_since >= quiet:
                # A source that was stopped does not know whether anything is left.
                self.ended = self.stop_reason() or "empty"
                return
            else:
                yield []

    def _hand_out(self, most: int | None = None) -> Iterator[list[Message]]:
        """Yields the queued messages, in portions, until the time is over."""
        waiting = self._waiting
        left = len(waiting) if most is None else most
        while left > 0:
            ended = self._reason_to_end(self.clock.monotonic())
            if ended:
                self.ended = ended
                return
            count = min(self.demand, left)
            dispatch = waiting[:count]
            del waiting[:count]
            left -= count
            yield dispatch

    def _adapt(self, handled: int, size: int, seconds: float) -> None:
        """Adapts the next request to half a second, by the speed of the last dispatches.

        :param size: Bytes of the handled messages.
        """
        fits = handled * _SECONDS_PER_RECEIVE / seconds if seconds > 0 else self.most
        small = handled * _MAX_DEMAND_BYTES / size if size else self.most
        most = min(self.most, max(_MAX_DEMAND, small))
        grown = int(min(fits, _MAX_GROWTH * self._next_demand, most))
        self._next_demand = max(self.demand, grown)

    def _reason_to_end(self, now: float) -> str:
        """Returns why nothing more is handed out, or ``""``."""
        seconds = self.budget.max_seconds
        if seconds is not None and now - self._started >= seconds:
            return self.stop_reason() or "max_seconds"
        return self.stop_reason()

    def _wanted(self, now: float) -> int:
        """Returns the number of messages to request now; 0 if a limit is reached."""
        budget = self.budget
        demand = self._next_demand
        if budget.max_messages is not None:
            demand = min(demand, budget.max_messages - self.received)
        reason = self._reason_to_end(now)
        if reason:
            self.ended = reason
        elif demand <= 0:
            self.ended = "max_messages"
        elif budget.max_bytes is not None and self.received_bytes >= budget.max_bytes:
            self.ended = "max_bytes"
        else:
            return demand
        return 0

    def _timeout(self, now: float, longest: float) -> float:
        """Returns the seconds to wait now, at most ``longest``; at least the minimum wait, or 0."""
        bounds = [_RECEIVE_TIMEOUT, longest]
        if self.budget.max_seconds is not None:
            bounds.append(self._started + self.budget.max_seconds - now)
        wanted = self.next_timeout()
        if wanted is not None:
            bounds.append(wanted)
        least = min(bounds)
        return max(_LEAST_TIMEOUT, least) if least > 0 else 0.0

    def _receive(self, granted: int, timeout: float) -> Sequence[Message]:
        """Receives at most what the limiter granted, and refunds the rest."""
        source, started = self.source, self.clock.monotonic()
        messages: Sequence[Message] = ()
        self.receives += 1
        try:
            messages = self._collect(
                lambda: source.secure(source.receive(granted, timeout=timeout))
            )
            passed = self.clock.monotonic() - started
            if not messages and passed < timeout:  # a source that does not wait
                self.clock.sleep(timeout - passed)
                self.seconds += timeout - passed
        finally:
            self.limiter.refund(granted - len(messages))
        return messages

    def _collect(self, call: Callable[[], Sequence[Message]]) -> Sequence[Message]:
        """Counts the messages that ``call`` returns, and queues them for a processor."""
        started = self.clock.monotonic()
        self.under_way = True
        messages = call()
        self.received += len(messages)
        self.received_bytes += sum([message.size for message in messages])
        self.seconds += self.clock.monotonic() - started
        if messages:
            self._record_waited(messages)
            self._enqueue(messages)
        self.under_way = False
        return messages

    def _record_waited(self, messages: Sequence[Message]) -> None:
        """Records how long messages had waited: by the first and the last of a receive, since
        reading every timestamp would cost as much as the receive.
        """
        if self.enqueued_at is None:
            return
        for message in (messages[0], messages[-1]):
            try:
                at = self.enqueued_at(message)
                waited = None if at is None else (message.received_at - at).total_seconds()
            except (OverflowError, TypeError, ValueError):  # the timestamp may be forged
                waited = None
            if waited is not None and waited > -_CLOCK_SKEW:
                self.waited = max(0.0, waited, self.waited or 0.0)

    def _enqueue(self, messages: Sequence[Message]) -> None:
        accepted = self.accept(messages)
        if self.error is not None:
            return
        try:
            check_messages(accepted)
            self._waiting += accepted
        except PipelineError as error:
            log.error(
                "%s; the run ends, and releases %s",
                error,
                pluralize(len(messages), "message"),
                extra={"code": "producer_crash"},
            )
            self.error, self.ended = error, "error"
