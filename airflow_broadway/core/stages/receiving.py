"""Taking messages from a source within a budget: receive, secure.

The order is the protocol's: a message is secured before any code of the user's sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Source
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.run_source import LIVE
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.text import many

log = logging.getLogger(__name__)

#: Seconds that one receive waits at most, so that a stop is noticed in time.
_RECEIVE_TIMEOUT = 1.0

#: Seconds that are worth waiting: what is less is the rounding of floats.
_LEAST_TIMEOUT = 1e-6

#: Seconds by which a broker's clock may be ahead; what is later still is no time of a message.
_CLOCK_SKEW = 3600.0

#: A receive asks for as many messages as are handled in so many seconds, ...
_SECONDS_PER_RECEIVE = 0.5
#: ... for at most so many times as many as the one before it, ...
_MAX_GROWTH = 4
#: ... and for at most so many, unless the processors can take more at once, ...
_MAX_DEMAND = 1000
#: ... or its producer wants more: then for at most so many bytes, by the size of the last ones.
_MAX_DEMAND_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a run stops taking messages.

    :param max_messages: After this many; ``None``: no bound.
    :param max_bytes: Once payloads of this many bytes were received.
    :param max_seconds: After this long, even if messages remain.
    :param wait_seconds: How long to wait for the first message.
    :param idle_seconds: After this long without a message, once there was one.
    """

    max_messages: int | None = None
    max_bytes: int | None = None
    max_seconds: float | None = None
    wait_seconds: float = 0.0
    idle_seconds: float = 0.0


def demand_of(pipeline: Pipeline) -> int:
    """Messages that the processors of ``pipeline`` can take together."""
    options = pipeline.processors
    taken: int = options.concurrency * options.max_demand
    return taken


def enqueued_of(pipeline: Pipeline) -> Callable[[Message], datetime | None] | None:
    """When a message of ``pipeline`` got to its broker; ``None`` of a run whose messages have not
    waited there: those of an archive, or of a past run.
    """
    return pipeline.producer.enqueued_at if pipeline.run.source.kind == LIVE else None


def check_messages(messages: Sequence[Any]) -> None:
    """Check that a source handed out messages.

    :raises PipelineError: If something is none.
    """
    for message in messages:
        if type(message) is not Message:
            raise PipelineError(
                f"a producer must emit messages, got: {message!r:.200}", code="producer_crash"
            )


class Receiving:
    """Iterates over dispatches: what the processors can take, or nothing when nothing came.

    Asks its source for as much as is handled in half a second, so that a broker's round trip is
    shared by many messages where these are handled fast, and little is taken in vain where they are
    not.  Hands out ``demand`` messages at a time: what a stop finds not handed out goes back.

    :param demand: Messages that all processors together can take.
    :param most: Messages to ask for at once, at most, where they are handled fast and are small.
    :param accept: Called with secured messages; returns what goes on.
    :param next_timeout: Asked before each wait: seconds until a dispatch is wanted, be it an empty
        one; ``None``: no bound.
    :param stop: Why to stop, or ``""``.
    :param enqueued_at: When a message got to its broker, if that says so.
    """

    def __init__(
        self,
        source: Source,
        budget: Budget,
        *,
        clock: Clock,
        limiter: RateLimiter,
        demand: int,
        most: int = _MAX_DEMAND,
        accept: Callable[[Sequence[Message]], Sequence[Message]] = lambda messages: messages,
        next_timeout: Callable[[], float | None] = lambda: None,
        stop: Callable[[], str] = lambda: "",
        enqueued_at: Callable[[Message], datetime | None] | None = None,
    ) -> None:
        self._source = source
        self._budget = budget
        self._clock = clock
        self._limiter = limiter
        self._portion = self._demand = demand
        self._most = most
        self._accept = accept
        self._next_timeout = next_timeout
        self._stop = stop
        self._enqueued_at = enqueued_at
        self._started = 0.0
        self._waiting: list[Message] = []  # received, and not yet handed out
        self._stopped = False
        #: How often the source was asked for messages.
        self.receives = 0
        self.received = 0
        self.received_bytes = 0
        #: Seconds spent in receiving and securing.
        self.seconds = 0.0
        #: Seconds that a message had waited at its broker, the most of any; ``None``: not known.
        self.waited: float | None = None
        #: Whether messages are on their way from the source to where they wait: what ends that from
        #: outside leaves no account.
        self.under_way = False
        #: Why it ended: ``empty``, ``max_messages``, ``max_bytes``, ``max_seconds``,
        #: ``rate_limiting``, ``error``, or what ``stop`` said.
        self.ended = ""
        #: Why messages went no further: the source handed out something else.
        self.error: PipelineError | None = None

    @property
    def lag(self) -> dict[str, float]:
        """:attr:`waited` among the seconds of a run, where it is known."""
        return {} if self.waited is None else {"waited": round(self.waited, 3)}

    def __iter__(self) -> Iterator[list[Message]]:
        self._started = self._clock.monotonic()
        yield from self._dispatches()
        if self.ended in ("empty", "max_messages", "max_bytes"):
            self._bring_in()
            yield from self._hand_out()
        elif self.ended == "rate_limiting":
            self._bring_in()
            yield from self._hand_out(self._limiter.take(len(self._waiting)))

    def stop(self) -> Sequence[Message]:
        """Have the source take nothing more; what was received and never handed out.

        Called when the run ends, however it does, before its lease is noted.  Safe to repeat.
        """
        self._bring_in()
        return list(self._waiting)

    def _bring_in(self) -> None:
        """Receive what the source had secured already, and have it take nothing more."""
        if not self._stopped:
            self._stopped = True
            self._collect(self._source.stop)

    def _dispatches(self) -> Iterator[list[Message]]:
        clock, budget = self._clock, self._budget
        quiet_since: float | None = None
        while True:
            now = clock.monotonic()
            demand = self._wanted(now)
            if not demand:
                return
            granted = self._limiter.take(demand)
            if not granted:
                if not self._await_limiter(now):
                    self.ended = "rate_limiting"
                    return
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
                # A source that was told to stop does not know whether anything is left.
                self.ended = self._stop() or "empty"
                return
            else:
                yield []

    def _await_limiter(self, now: float) -> bool:
        """Wait until the limiter may grant something, or a dispatch is wanted.

        :returns: Whether it grants something before the time is over; else nothing is waited for.
        """
        pause, seconds = self._limiter.wait_seconds(), self._budget.max_seconds
        if seconds is None or now + pause >= self._started + seconds:
            return False
        self._clock.sleep(self._timeout(now, pause))
        return True

    def _hand_out(self, most: int | None = None) -> Iterator[list[Message]]:
        """What waits, in portions, until the time is over."""
        waiting, portion = self._waiting, self._portion
        left = len(waiting) if most is None else most
        while left > 0:
            ended = self._reason_to_end(self._clock.monotonic())
            if ended:
                self.ended = ended
                return
            count = min(portion, left)
            dispatch = waiting[:count]
            del waiting[:count]
            left -= count
            yield dispatch

    def _adapt(self, handled: int, size: int, seconds: float) -> None:
        """Ask next for what is handled in half a second, by what was handled in ``seconds``.

        :param size: Bytes of what was handled.
        """
        fits = handled * _SECONDS_PER_RECEIVE / seconds if seconds > 0 else self._most
        small = handled * _MAX_DEMAND_BYTES / size if size else self._most
        most = min(self._most, max(_MAX_DEMAND, small))
        grown = int(min(fits, _MAX_GROWTH * self._demand, most))
        self._demand = max(self._portion, grown)

    def _reason_to_end(self, now: float) -> str:
        """Why nothing more is handed out, or ``""``."""
        seconds = self._budget.max_seconds
        if seconds is not None and now - self._started >= seconds:
            return self._stop() or "max_seconds"
        return self._stop()

    def _wanted(self, now: float) -> int:
        """Messages to ask for now; 0 when a bound is reached."""
        budget = self._budget
        demand = self._demand
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
        """Seconds to wait now, at most ``longest``; at least what is worth waiting, or 0."""
        bounds = [_RECEIVE_TIMEOUT, longest]
        if self._budget.max_seconds is not None:
            bounds.append(self._started + self._budget.max_seconds - now)
        wanted = self._next_timeout()
        if wanted is not None:
            bounds.append(wanted)
        least = min(bounds)
        return max(_LEAST_TIMEOUT, least) if least > 0 else 0.0

    def _receive(self, granted: int, timeout: float) -> Sequence[Message]:
        """Receive at most what the limiter granted; it gets back what did not come."""
        source, started = self._source, self._clock.monotonic()
        messages: Sequence[Message] = ()
        self.receives += 1
        try:
            messages = self._collect(
                lambda: source.secure(source.receive(granted, timeout=timeout))
            )
            passed = self._clock.monotonic() - started
            if not messages and passed < timeout:  # a source that does not wait
                self._clock.sleep(timeout - passed)
                self.seconds += timeout - passed
        finally:
            self._limiter.refund(granted - len(messages))
        return messages

    def _collect(self, work: Callable[[], Sequence[Message]]) -> Sequence[Message]:
        """Account for what the source gives by ``work``, and let it wait for a processor."""
        started = self._clock.monotonic()
        self.under_way = True
        messages = work()
        self.received += len(messages)
        self.received_bytes += sum([message.size for message in messages])
        self.seconds += self._clock.monotonic() - started
        self._note_waited(messages)
        self._enqueue(messages)
        self.under_way = False
        return messages

    def _note_waited(self, messages: Sequence[Message]) -> None:
        """Note how long messages had waited: by the first and the last of what came at once, for to
        read each one's time would cost as much as to receive it.
        """
        if self._enqueued_at is None or not messages:
            return
        for message in (messages[0], messages[-1]):
            try:
                at = self._enqueued_at(message)
                waited = None if at is None else (message.received_at - at).total_seconds()
            except (OverflowError, TypeError, ValueError):  # anybody may have written it
                waited = None
            if waited is not None and waited > -_CLOCK_SKEW:
                self.waited = max(0.0, waited, self.waited or 0.0)

    def _enqueue(self, messages: Sequence[Message]) -> None:
        """Have what was received wait for a processor."""
        if not messages:
            return
        accepted = self._accept(messages)
        if self.error is not None:
            return
        try:
            check_messages(accepted)
            self._waiting += accepted
        except PipelineError as error:
            log.error(
                "%s; the run ends, and gives back %s",
                error,
                many(len(messages), "message"),
                extra={"code": "producer_crash"},
            )
            self.error, self.ended = error, "error"
