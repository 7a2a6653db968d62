"""A connection to RabbitMQ with a thread of its own.

The thread sends heartbeats while callbacks run.  pika is not thread-safe: all calls to it run in
that thread, through :meth:`ConnectionThread.post`, and other threads wait for replies.  A lost
connection is never reopened; callers open a new one.

This module translates errors of RabbitMQ, of pika and of the socket into ours.  Reconnecting is
delayed by one of Broadway's four back-offs.
"""

from __future__ import annotations

import logging
import math
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import BroadwayError, ProducerError, ProducerUnavailable
from airflow_broadway.core.log_context import keep_ids, log_ids
from airflow_broadway.producers.rabbitmq.amqp.address import Address
from airflow_broadway.producers.rabbitmq.amqp.wire import connection_class
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions, backoff_bounds

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds between two checks whether the run is stopping.
_STOP_CHECK_INTERVAL = 0.5


class Backoff:
    """The delays between consecutive failures; :meth:`reset` after a success."""

    def __init__(self, kind: str, low: float, high: float, *, seed: int | None = None) -> None:
        self._kind = kind
        self._low, self._high = low, high
        self._last: float | None = None
        self._random = random.Random(seed)

    def next(self) -> float | None:
        """Returns the next delay in seconds; ``None``: do not reconnect."""
        low, high, last = self._low, self._high, self._last
        draw = self._random.uniform
        if self._kind == "stop":
            return None
        if self._kind == "rand":
            return draw(low, high)
        if self._kind == "exp":
            self._last = low if last is None else min(2 * last, high)
        elif last is None:
            self._last = min(draw(low, 3 * low), high)
        else:
            self._last = draw(min(last, max(low, high / 3)), min(3 * last, high))
        return self._last

    def reset(self) -> None:
        """Resets the delay to the shortest."""
        self._last = None


class Attempts:
    """A series of consecutive failures, with back-off and a time limit.

    Only :meth:`worked` ends it: a new connection that fails at its first use is another failure.

    :param seconds: The time limit, from the first failure.
    :param stopping: Whether the run is stopping: this ends a delay.
    """

    def __init__(
        self,
        backoff: Backoff,
        seconds: float,
        clock: Clock,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backoff = backoff
        self._seconds = seconds
        self._clock = clock
        self._stopping = stopping
        self._end: float | None = None

    @classmethod
    def of(
        cls, options: RabbitMQOptions, clock: Clock, stopping: Callable[[], bool] = lambda: False
    ) -> Attempts:
        """Returns the attempts configured by a producer's options."""
        bounds = backoff_bounds(options.backoff_min, options.backoff_max)
        return cls(
            Backoff(options.backoff_type, *bounds), options.reconnect_timeout, clock, stopping
        )

    def worked(self) -> None:
        """Ends the series: the next failure starts another."""
        self._end = None
        self._backoff.reset()

    def again(self, error: BroadwayError) -> None:
        """Waits for the back-off's delay; after the first failure of a series, not at all.

        :param error: The failure.
        :raises BroadwayError: The failure, if it is not to be retried.
        """
        if self._end is not None:
            self.pause(error)
        self._begin()

    def pause(self, error: BroadwayError) -> None:
        """Waits like :meth:`again`, but after the first failure too."""
        end = self._begin()
        pause, now = self._backoff.next(), self._clock.monotonic()
        if pause is None or now + pause > end or self._stopping():
            raise error
        log.warning("%s; trying again in %.1f s", error, pause)
        until = now + pause
        while (left := until - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, _STOP_CHECK_INTERVAL))
            if self._stopping():
                raise error

    def _begin(self) -> float:
        """Starts the series, unless it has started; returns its end."""
        if self._end is None:
            self._end = self._clock.monotonic() + self._seconds
        return self._end


def keep_trying(connect: Callable[[], _T], attempts: Attempts) -> _T:
    """Calls ``connect`` and returns its result; retries while the broker is unavailable.

    :raises ProducerUnavailable: If the attempts are exhausted.
    """
    while True:
        try:
            return connect()
        except ProducerUnavailable as error:
            attempts.pause(error)


#: AMQP's codes of a closed connection after which reconnecting may succeed: normal close, forced
#: close (by an operator, or the broker stops), internal error.
_RETRYABLE_CODES = (200, 320, 541)
#: AMQP's codes of two errors that callers may expect: not found, exclusive to another connection.
MISSING, LOCKED = 404, 405


class Refused(ProducerError):
    """The broker refused a request and closed the channel.

    :param code: AMQP's code: 403 access refused, 404 not found, 405 resource locked, 406
        precondition failed.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ refused: {text} ({code})")
        self.code = code
        self.text = text


def acknowledged_too_late(error: Refused) -> bool:
    """Whether the broker closed the channel by its delivery acknowledgement timeout."""
    return error.code == 406 and "delivery acknowledgement" in error.text


def explained(error: Refused, subject: str) -> ProducerError:
    """Translates a refusal into a ProducerError with advice."""
    advice = {
        403: "grant the user the permissions in docs/rabbitmq.md",
        404: "create it, or let the option `declare` do so",
        405: "another connection holds it exclusively",
        406: "it exists with other arguments; declare it as it is, or delete it once it is empty",
    }.get(error.code)
    if error.code == 403 and "exclusive use" in error.text:
        advice = "another consumer has it for itself: an option `exclusive`, of a run or elsewhere"
    if error.code == 406 and "message size" in error.text:
        advice = "set the option max_message_bytes below that: a bundle holds no more"
    return ProducerError(f"{subject}: {error.text}" + (f"; {advice}" if advice else ""))


class Blocked(ProducerUnavailable):
    """The broker blocked the connection for too long, by a memory or disk alarm."""


def translate(error: BaseException, address: Address, *, opened: bool = False) -> ProducerError:
    """Translates an error of pika or of the socket into a ProducerError.

    :param opened: Whether the connection was open.
    """
    if isinstance(error, ProducerError):
        return error
    causes = _list_causes(error)
    for cause in causes:
        refusal = _map_refusal(cause, address)
        if refusal is not None:
            return refusal
    where = f"RabbitMQ at {address.netloc}"
    for cause in causes:
        code = getattr(cause, "reply_code", 0)
        if code:
            kind = ProducerUnavailable if code in _RETRYABLE_CODES else ProducerError
            return kind(
                f"{where} closed the connection: {getattr(cause, 'reply_text', '')} ({code})"
            )
    return _map_loss(next((c for c in causes if isinstance(c, OSError)), causes[-1]), where, opened)


def _map_refusal(cause: BaseException, address: Address) -> ProducerError | None:
    """Translates a refused login, virtual host or TLS handshake, or a blocked connection."""
    from pika import exceptions

    where, code = f"RabbitMQ at {address.netloc}", getattr(cause, "reply_code", 0)
    logins = (exceptions.ProbableAuthenticationError, exceptions.AuthenticationError)
    if isinstance(cause, logins) or code == 403:
        if address.external:
            return ProducerError(
                f"{where} refused the login by certificate: it knows no user of that name, or"
                " lacks the plugin rabbitmq_auth_mechanism_ssl"
            )
        return ProducerError(
            f"{where} refused the login of user {address.login!r}: wrong name or password, or"
            " a user that may come from the broker's own host only"
        )
    if isinstance(cause, exceptions.ProbableAccessDeniedError) or code == 530:
        return ProducerError(
            f"{where} refused user {address.login!r} the virtual host"
            f" {address.virtual_host!r}: it does not exist, or the user has no permission there"
        )
    if isinstance(cause, ssl.SSLError):
        return ProducerError(f"{where}: TLS failed: {cause}")
    if isinstance(cause, exceptions.ConnectionBlockedTimeout):
        return Blocked(
            f"{where} is short of memory or disk, and has blocked this connection"
            f" for {address.blocked_connection_timeout:.0f} s: make room there and clear the task"
        )
    return None


def _map_loss(cause: BaseException, where: str, opened: bool) -> ProducerError:
    """Translates a lost or failed connection for which the broker sent no error."""
    text = str(cause) or type(cause).__name__
    if isinstance(cause, socket.gaierror):
        text = f"the host's name is not known ({text})"
    if not opened and (alert := re.search(r"\[SSL: \w*ALERT\w*\][^'\"]*", text)):
        # With TLS 1.3 the server's alert, mostly about our certificate, arrives after the
        # handshake.
        return ProducerError(f"{where}: TLS failed: {alert[0].strip()}")
    if opened:
        return ProducerUnavailable(f"the connection to {where} is lost: {text}")
    return ProducerUnavailable(f"{where} cannot be reached: {text}")


def _list_causes(error: BaseException) -> list[BaseException]:
    """Returns the error and the errors that it wraps, the outermost first."""
    causes: list[BaseException] = []
    pending = [error]
    while pending and len(causes) < 50:
        cause = pending.pop(0)
        if cause in causes:
            continue
        causes.append(cause)
        pending += [item for item in cause.args if isinstance(item, BaseException)]
        for name in ("exceptions", "exception", "__cause__"):
            value = getattr(cause, name, None)
            if isinstance(value, BaseException):
                pending.append(value)
            elif isinstance(value, (list, tuple)):
                pending += [item for item in value if isinstance(item, BaseException)]
    return causes


#: Timeout of a request to the broker, in seconds.
ANSWER_TIMEOUT = 60.0


class Reply(Future[Any]):
    """A future that is completed once; later results are ignored."""

    def resolve(self, value: Any = None) -> None:
        if not self.done():
            self.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.done():
            self.set_exception(error)

    def wait(self, seconds: float) -> Any:
        try:
            return self.result(seconds)
        except TimeoutError:
            raise ProducerUnavailable(f"RabbitMQ did not answer within {seconds:.0f} s") from None


class ConnectionThread:
    """A connection and its thread.

    :param on_lost: Called in the thread, with the error, when the connection is lost.
    :raises ConnectionMissing: If the address cannot be used.
    :raises ProducerUnavailable: If the broker cannot be reached within ``address.timeout``.
    :raises ProducerError: If the broker refuses the connection.
    """

    def __init__(
        self, address: Address, *, on_lost: Callable[[ProducerError], None] = lambda error: None
    ) -> None:
        self.address = address
        self.lost: ProducerError | None = None
        self._on_lost = on_lost
        self._waiting: set[Reply] = set()
        self._opened = Reply()
        self._closing = False
        self._blocked = False
        self._changed_at = -math.inf
        #: Pika's connection; for this thread only.
        self.raw: Any = None
        self._done = threading.Event()
        self._parameters = address.parameters()
        logger = logging.getLogger("pika")
        # pika logs every step at INFO, a missing queue as a warning, and a refusal as several
        # errors with stack traces.  The relevant part is logged here, in one line.
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
        with log_ids(batcher=None, batch_id=None, message_id=None):  # it outlives them
            run = keep_ids(self._run)
        self._thread = threading.Thread(target=run, name="rabbitmq", daemon=True)
        self._thread.start()
        try:
            self._opened.wait(address.timeout)
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            # A thread that has failed ends immediately; one that still connects may take long.
            self.close(wait=self.lost is not None)
            raise

    @classmethod
    def to(
        cls, address: Address, *, on_lost: Callable[[ProducerError], None] = lambda error: None
    ) -> ConnectionThread:
        """Connects to the first available host of an address.

        :raises ProducerUnavailable: If no host is available.
        """
        failures: list[str] = []
        for host in address.hosts():
            try:
                return cls(host, on_lost=on_lost)
            except ProducerUnavailable as error:
                failures.append(str(error))
        raise ProducerUnavailable("; ".join(failures))

    @property
    def version(self) -> str:
        """The broker's version in its server properties; empty if it is missing."""
        version = (self.raw.server_properties or {}).get("version", "")
        return version.decode("utf-8", "replace") if isinstance(version, bytes) else str(version)

    @property
    def max_properties(self) -> int:
        """The maximum size of a message's properties in bytes: they must fit a frame."""
        return int(self.raw.params.frame_max or 2**31) - 20

    @property
    def blocked(self) -> bool:
        """Whether the broker blocks this connection, or did so within the last ``timeout`` seconds.

        Then an overdue reply may still arrive.
        """
        since = time.monotonic() - self._changed_at
        return self.lost is None and (self._blocked or since < self.address.timeout)

    def post(self, function: Callable[[], None]) -> None:
        """Schedules ``function`` in the thread; does nothing if the connection is lost."""
        if self.lost is None and not self._done.is_set():
            self.raw.ioloop.add_callback_threadsafe(function)

    def ask(self, function: Callable[[Reply], None], seconds: float = ANSWER_TIMEOUT) -> Any:
        """Calls ``function`` with a reply in the thread, and returns the reply's result.

        :raises ProducerError: If the broker refuses, or the connection is lost.
        """
        reply = Reply()

        def run() -> None:
            try:
                function(reply)
            except Exception as error:  # of pika, for a closed channel
                reply.fail(translate(error, self.address))

        self._waiting.add(reply)  # before the check: a concurrent loss then fails the reply
        try:
            if self.lost is not None:
                raise self.lost
            self.post(run)
            while True:
                try:
                    return reply.wait(seconds)
                except ProducerUnavailable:
                    if reply.done() or not self.blocked:
                        raise
        finally:
            self._waiting.discard(reply)

    def run(self, function: Callable[[], object]) -> None:
        """Calls ``function`` in the thread, and waits for its end.

        :raises ProducerError: If the connection is lost.
        """

        def run(reply: Reply) -> None:
            function()
            reply.resolve()

        self.ask(run)

    def channel(self) -> Channel:
        """Opens a channel.

        :raises ProducerError: If the connection is lost.
        """

        def open_channel(reply: Reply) -> None:
            self.raw.channel(on_open_callback=lambda raw: reply.resolve(Channel(self, raw)))

        channel: Channel = self.ask(open_channel)
        return channel

    def call(self, subject: str, method: str, *, accepts: int = 0, **arguments: Any) -> Any:
        """Calls a method of pika's channel on a new channel, and returns the broker's response.

        :param subject: A description of the queue or exchange, for errors.
        :param accepts: AMQP's code of an expected refusal, for which ``None`` is returned.
        :raises ProducerError: If the broker refuses, with advice.
        """
        channel = self.channel()
        try:
            response = channel.call(method, **arguments).method
        except Refused as error:
            if error.code == accepts:
                return None
            raise explained(error, subject) from None
        channel.close()
        return response

    def depth(self, queue: str) -> int | None:
        """Returns the number of ready messages in a queue; ``None`` if it does not exist."""
        response = self.call(
            f"the queue {queue!r}", "queue_declare", accepts=MISSING, queue=queue, passive=True
        )
        return None if response is None else int(response.message_count)

    def close(self, *, wait: bool = True) -> None:
        """Closes the connection and ends the thread.  Safe to repeat."""
        self._closing = True
        if self.raw is not None and not self._done.is_set():
            try:
                self.raw.ioloop.add_callback_threadsafe(self._close)
            except Exception:  # the loop has just ended
                log.debug("The connection had ended already.", exc_info=True)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    # -- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.raw = connection_class()(
                self._parameters,
                on_open_callback=lambda raw: self._on_open(),
                on_open_error_callback=lambda raw, error: self._end(error),
                on_close_callback=lambda raw, error: self._end(error),
            )
            self.raw.ioloop.start()
        except Exception as error:  # of any kind: it must fail the waiting replies
            log.debug("The connection's thread ended.", exc_info=True)
            self._end(error if self.raw is None else _map_unexpected(error, self.address))
            if self.raw is not None:
                self.raw.sever()  # so that the broker requeues unacknowledged messages
        finally:
            self._done.set()
            if self.raw is not None:
                self.raw.ioloop.close()

    def _on_open(self) -> None:
        self.raw.add_on_connection_blocked_callback(lambda *_: self._block(True))
        self.raw.add_on_connection_unblocked_callback(lambda *_: self._block(False))
        if self._closing:
            self.raw.close()
        else:
            self._opened.resolve()

    def _block(self, blocked: bool) -> None:
        self._blocked, self._changed_at = blocked, time.monotonic()
        if blocked:
            log.warning(
                "RabbitMQ is short of memory or disk and blocks this connection: waiting for"
                " %.0f s at most.",
                self.address.blocked_connection_timeout,
            )
        else:
            log.warning("RabbitMQ unblocked this connection.")

    def _close(self) -> None:
        if self.raw.is_open:
            self.raw.close()
        elif not self.raw.is_closing:
            self.raw.ioloop.stop()

    def _end(self, error: BaseException) -> None:
        first = self.lost is None
        if first:
            self.lost = (
                ProducerUnavailable("the connection was closed")
                if self._closing
                else translate(error, self.address, opened=self._opened.done())
            )
        assert self.lost is not None
        opened = self._opened.done()
        self._opened.fail(self.lost)
        for reply in list(self._waiting):
            reply.fail(self.lost)
        if first and opened and not self._closing:
            self._on_lost(self.lost)
        if self.raw is not None:
            self.raw.ioloop.stop()


def _map_unexpected(error: Exception, address: Address) -> ProducerError:
    from pika.exceptions import ChannelWrongStateError, ConnectionWrongStateError

    if isinstance(error, (ChannelWrongStateError, ConnectionWrongStateError)):
        return translate(error, address, opened=True)  # the connection was lost just now
    unexpected = ProducerError(
        f"the connection to RabbitMQ was ended by an unexpected {type(error).__name__}: {error};"
        " unsecured messages are in their queue; please report it"
    )
    unexpected.__cause__ = error
    return unexpected


class Channel:
    """A channel, for use in any thread but the connection's own.

    :param raw: Pika's channel; for the connection's thread only.
    """

    def __init__(self, connection: ConnectionThread, raw: Any) -> None:
        self.connection = connection
        self.raw = raw
        self.lost: ProducerError | None = None
        self._waiting: set[Reply] = set()
        self._ended = threading.Event()
        self._on_lost: list[Callable[[ProducerError], None]] = []
        raw.add_on_close_callback(self._closed)

    @property
    def number(self) -> int:
        """The channel's number on its connection."""
        return int(self.raw.channel_number)

    def on_lost(self, function: Callable[[ProducerError], None]) -> None:
        """Registers ``function``, which the thread calls when the channel is lost."""
        self._on_lost.append(function)

    def call(self, name: str, seconds: float = ANSWER_TIMEOUT, **arguments: Any) -> Any:
        """Calls a method of pika's channel and returns the argument of its ``callback``.

        :raises Refused: If the broker refuses and closes the channel.
        """

        def run(reply: Reply) -> None:
            self.await_reply(reply)
            getattr(self.raw, name)(callback=reply.resolve, **arguments)

        return self.connection.ask(run, seconds)

    def await_reply(self, reply: Reply) -> None:
        """Makes ``reply`` fail when the channel is lost.  For the connection's thread.

        :raises ProducerError: If the channel is lost already.
        """
        if self.lost is not None:
            raise self.lost
        self._waiting = {reply for reply in self._waiting if not reply.done()}
        self._waiting.add(reply)

    def await_closed(self, seconds: float) -> None:
        """Waits until the channel is closed, for ``seconds`` at most."""
        self._ended.wait(seconds)

    def flush_and_close(self) -> None:
        """Closes the channel after the broker has processed all earlier requests."""
        if self.lost is None and self.connection.lost is None:
            try:
                self.call("basic_qos", prefetch_count=1)  # processed after all earlier requests
            except ProducerError:
                return
            self.close()

    def close(self) -> None:
        """Closes the channel; does nothing if it is lost."""

        def run() -> None:
            if self.raw.is_open:
                self.raw.close()

        self.connection.post(run)

    def _closed(self, raw: Any, error: Any) -> None:
        from pika.exceptions import ChannelClosedByBroker

        if self.connection.lost is not None:
            self.lost = self.connection.lost
        elif isinstance(error, ChannelClosedByBroker):
            self.lost = Refused(error.reply_code, str(error.reply_text))
        else:  # with its connection: pika calls the channels' callbacks first
            self.lost = translate(error, self.connection.address, opened=True)
        for reply in list(self._waiting):
            reply.fail(self.lost)
        for function in self._on_lost:
            function(self.lost)
        self._ended.set()


class RawProperties(NamedTuple):
    """Raw properties of the class ``basic``, sent by pika unchanged."""

    data: bytes
    INDEX: int = 60

    def encode(self) -> list[bytes]:
        """Returns the bytes; called by pika."""
        return [self.data]
