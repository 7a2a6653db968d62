"""One connection to RabbitMQ, run by a thread of its own.

The thread keeps heartbeats going while callbacks take their time.  pika is not thread-safe: every
use of it happens in that thread, by :meth:`ConnectionThread.post`, and other threads wait for
replies.  A connection that is lost stays lost; whoever wants to go on opens another.

Errors of RabbitMQ, of pika and of the socket become ours here.  Attempts to connect again are paced
by Broadway's four back-offs.
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

_Made = TypeVar("_Made")

#: Seconds between two looks at whether the run was told to stop.
_STOP_CHECK_INTERVAL = 0.5


class Backoff:
    """The delays of one stretch of failures; :meth:`reset` after a success."""

    def __init__(self, kind: str, low: float, high: float, *, seed: int | None = None) -> None:
        self._kind = kind
        self._low, self._high = low, high
        self._last: float | None = None
        self._random = random.Random(seed)

    def next(self) -> float | None:
        """Seconds to wait; ``None``: do not connect again."""
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
        """Begin with the shortest delay again."""
        self._last = None


class Attempts:
    """One stretch of failures: paced by a back-off, and given up in the end.

    It goes on until :meth:`worked`: a connection that is made and fails at its first use is no
    better than none.

    :param seconds: For how long it is tried at most.
    :param stopping: Asked while it waits: who is told to stop waits for nothing.
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
        """Those that a producer's options ask for."""
        bounds = backoff_bounds(options.backoff_min, options.backoff_max)
        return cls(
            Backoff(options.backoff_type, *bounds), options.reconnect_timeout, clock, stopping
        )

    def worked(self) -> None:
        """End this stretch: the next failure begins another."""
        self._end = None
        self._backoff.reset()

    def again(self, error: BroadwayError) -> None:
        """Wait as the back-off says; after the first failure of a stretch, not at all.

        :param error: What failed.
        :raises BroadwayError: The error, if it is not to be tried again.
        """
        if self._end is not None:
            self.pause(error)
        self._begin()

    def pause(self, error: BroadwayError) -> None:
        """The same, but wait after the first failure too."""
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
        """When this stretch is given up: so long after its first failure."""
        if self._end is None:
            self._end = self._clock.monotonic() + self._seconds
        return self._end


def keep_trying(connect: Callable[[], _Made], attempts: Attempts) -> _Made:
    """What ``connect`` makes, tried again while the broker is unavailable.

    :raises ProducerUnavailable: If the attempts are at their end.
    """
    while True:
        try:
            return connect()
        except ProducerUnavailable as error:
            attempts.pause(error)


#: AMQP's codes of a connection that another may replace: closed in order, closed by force (an
#: operator, or the broker stops), an internal error of the broker.
_MAY_COME_BACK = (200, 320, 541)
#: AMQP's codes of two refusals that may be an answer: not there, exclusive to another connection.
MISSING, LOCKED = 404, 405


class Refused(ProducerError):
    """The broker closed a channel instead of doing what it was asked.

    :param code: AMQP's: 403 permissions, 404 missing, 405 locked, 406 other arguments.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ refused: {text} ({code})")
        self.code = code
        self.text = text


def acknowledged_too_late(error: Refused) -> bool:
    """Whether the broker lost patience with a consumer that left a delivery unacknowledged."""
    return error.code == 406 and "delivery acknowledgement" in error.text


def explained(error: Refused, what: str) -> ProducerError:
    """The refusal, with what to do about it."""
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
    return ProducerError(f"{what}: {error.text}" + (f"; {advice}" if advice else ""))


class Blocked(ProducerUnavailable):
    """The broker took nothing from the connection for too long, being short of memory or disk."""


def translate(error: BaseException, address: Address, *, opened: bool = False) -> ProducerError:
    """Our error for one of pika's, or of the socket's.

    :param opened: Whether the connection had been opened before.
    """
    if isinstance(error, ProducerError):
        return error
    causes = _causes(error)
    for cause in causes:
        refusal = _refusal(cause, address)
        if refusal is not None:
            return refusal
    where = f"RabbitMQ at {address.shown}"
    for cause in causes:
        code = getattr(cause, "reply_code", 0)
        if code:
            kind = ProducerUnavailable if code in _MAY_COME_BACK else ProducerError
            return kind(
                f"{where} closed the connection: {getattr(cause, 'reply_text', '')} ({code})"
            )
    return _loss(next((c for c in causes if isinstance(c, OSError)), causes[-1]), where, opened)


def _refusal(cause: BaseException, address: Address) -> ProducerError | None:
    """What it means if it says why the broker does not serve this user, or takes nothing."""
    from pika import exceptions

    where, code = f"RabbitMQ at {address.shown}", getattr(cause, "reply_code", 0)
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
            f"{where} is short of memory or disk, and has taken nothing from this connection"
            f" for {address.blocked_connection_timeout:.0f} s: make room there and clear the task"
        )
    return None


def _loss(cause: BaseException, where: str, opened: bool) -> ProducerError:
    """What it means if the broker said nothing."""
    text = str(cause) or type(cause).__name__
    if isinstance(cause, socket.gaierror):
        text = f"the host's name is not known ({text})"
    if not opened and (alert := re.search(r"\[SSL: \w*ALERT\w*\][^'\"]*", text)):
        # The server's objection, to our certificate mostly, comes when we take TLS for settled.
        return ProducerError(f"{where}: TLS failed: {alert[0].strip()}")
    if opened:
        return ProducerUnavailable(f"the connection to {where} is lost: {text}")
    return ProducerUnavailable(f"{where} cannot be reached: {text}")


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it wraps, the outermost first."""
    found: list[BaseException] = []
    todo = [error]
    while todo and len(found) < 50:
        each = todo.pop(0)
        if each in found:
            continue
        found.append(each)
        todo += [item for item in each.args if isinstance(item, BaseException)]
        for name in ("exceptions", "exception", "__cause__"):
            value = getattr(each, name, None)
            if isinstance(value, BaseException):
                todo.append(value)
            elif isinstance(value, (list, tuple)):
                todo += [item for item in value if isinstance(item, BaseException)]
    return found


#: Seconds that the broker may take to answer one request.
ANSWER_TIMEOUT = 60.0


class Reply(Future[Any]):
    """What one thread waits for and another gives: once, what comes later is of no effect."""

    def give(self, value: Any = None) -> None:
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

    :param on_lost: Called in the thread, with why, when the connection is lost.
    :raises ConnectionMissing: If the address cannot be used.
    :raises ProducerUnavailable: If the broker cannot be reached within ``address.timeout``.
    :raises ProducerError: If it refuses.
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
        #: Pika's connection; to be used in the thread.
        self.raw: Any = None
        self._done = threading.Event()
        self._parameters = address.parameters()
        logger = logging.getLogger("pika")
        # It logs every step at INFO, a queue that is not there yet as a warning, and a refusal as
        # several errors with stack traces.  What matters of that is logged here, in one line.
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
        with log_ids(batcher=None, batch_id=None, message_id=None):  # it outlives them
            run = keep_ids(self._run)
        self._thread = threading.Thread(target=run, name="rabbitmq", daemon=True)
        self._thread.start()
        try:
            self._opened.wait(address.timeout)
        except BaseException:  # a kill too; raised again
            # A thread that has said why it failed ends at once; one that still tries may take long.
            self.close(wait=self.lost is not None)
            raise

    @classmethod
    def to(
        cls, address: Address, *, on_lost: Callable[[ProducerError], None] = lambda error: None
    ) -> ConnectionThread:
        """One to the first of the address's hosts that answers.

        :raises ProducerUnavailable: If none does.
        """
        tried: list[str] = []
        for host in address.hosts():
            try:
                return cls(host, on_lost=on_lost)
            except ProducerUnavailable as error:
                tried.append(str(error))
        raise ProducerUnavailable("; ".join(tried))

    @property
    def version(self) -> str:
        """The broker's version, as it says itself; empty if it does not."""
        version = (self.raw.server_properties or {}).get("version", "")
        return version.decode("utf-8", "replace") if isinstance(version, bytes) else str(version)

    @property
    def max_properties(self) -> int:
        """The most bytes of properties that a message may have: they travel in one frame."""
        return int(self.raw.params.frame_max or 2**31) - 20

    @property
    def blocked(self) -> bool:
        """Whether the broker takes nothing from this connection, or took nothing until just now.

        Then what is awaited may still come.
        """
        since = time.monotonic() - self._changed_at
        return self.lost is None and (self._blocked or since < self.address.timeout)

    def post(self, function: Callable[[], None]) -> None:
        """Have the thread call ``function`` soon; nothing happens if the connection is lost."""
        if self.lost is None and not self._done.is_set():
            self.raw.ioloop.add_callback_threadsafe(function)

    def ask(self, function: Callable[[Reply], None], seconds: float = ANSWER_TIMEOUT) -> Any:
        """Have the thread call ``function`` with a reply, and wait for what it is given.

        :raises ProducerError: If the broker refuses, or the connection is lost.
        """
        reply = Reply()

        def run() -> None:
            try:
                function(reply)
            except Exception as error:  # pika's: a channel that is closed
                reply.fail(translate(error, self.address))

        self._waiting.add(reply)  # first, so that a loss at any moment reaches it
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
        """Has the thread call ``function``, and waits for it.

        :raises ProducerError: If the connection is lost.
        """

        def run(reply: Reply) -> None:
            function()
            reply.give()

        self.ask(run)

    def channel(self) -> Channel:
        """Open a channel.

        :raises ProducerError: If the connection is lost.
        """

        def open_channel(reply: Reply) -> None:
            self.raw.channel(on_open_callback=lambda raw: reply.give(Channel(self, raw)))

        channel: Channel = self.ask(open_channel)
        return channel

    def call(self, what: str, method: str, *, accepts: int = 0, **arguments: Any) -> Any:
        """Calls a method of pika's channel on a channel of its own, and returns the answer.

        :param what: What is called upon, for errors.
        :param accepts: AMQP's code of a refusal that is an answer too: ``None``.
        :raises ProducerError: If the broker refuses, with what to do about it.
        """
        channel = self.channel()
        try:
            answer = channel.call(method, **arguments).method
        except Refused as error:
            if error.code == accepts:
                return None
            raise explained(error, what) from None
        channel.close()
        return answer

    def depth(self, queue: str) -> int | None:
        """Returns the messages that are ready in a queue; ``None`` if there is no such queue."""
        answer = self.call(
            f"the queue {queue!r}", "queue_declare", accepts=MISSING, queue=queue, passive=True
        )
        return None if answer is None else int(answer.message_count)

    def close(self, *, wait: bool = True) -> None:
        """Close the connection and end the thread.  Safe to repeat."""
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
        except Exception as error:  # whatever it is, those who wait must hear of it
            log.debug("The connection's thread ended.", exc_info=True)
            self._end(error if self.raw is None else _unexpected(error, self.address))
            if self.raw is not None:
                self.raw.sever()  # so that the broker gives what is unacknowledged to others
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
            self._opened.give()

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


def _unexpected(error: Exception, address: Address) -> ProducerError:
    from pika.exceptions import ChannelWrongStateError, ConnectionWrongStateError

    if isinstance(error, (ChannelWrongStateError, ConnectionWrongStateError)):
        return translate(error, address, opened=True)  # it was lost just now
    made = ProducerError(
        f"the connection to RabbitMQ was ended by an unexpected {type(error).__name__}: {error};"
        " what it had not secured is in its queue; please report it"
    )
    made.__cause__ = error
    return made


class Channel:
    """A channel, called from any thread but the connection's own.

    :param raw: pika's; to be used in the connection's thread.
    """

    def __init__(self, connection: ConnectionThread, raw: Any) -> None:
        self.connection = connection
        self.raw = raw
        self.lost: ProducerError | None = None
        self._waiting: set[Reply] = set()
        self._gone = threading.Event()
        self._on_lost: list[Callable[[ProducerError], None]] = []
        raw.add_on_close_callback(self._closed)

    @property
    def number(self) -> int:
        """Its number on its connection."""
        return int(self.raw.channel_number)

    def on_lost(self, function: Callable[[ProducerError], None]) -> None:
        """Have ``function`` called in the thread when the channel is lost."""
        self._on_lost.append(function)

    def call(self, name: str, seconds: float = ANSWER_TIMEOUT, **arguments: Any) -> Any:
        """Call a method of pika's channel that has a ``callback``, and return what that is given.

        :raises Refused: If the broker closes the channel over it.
        """

        def run(reply: Reply) -> None:
            self.await_reply(reply)
            getattr(self.raw, name)(callback=reply.give, **arguments)

        return self.connection.ask(run, seconds)

    def await_reply(self, reply: Reply) -> None:
        """Let ``reply`` fail with the channel.  For the connection's thread.

        :raises ProducerError: If it is lost already.
        """
        if self.lost is not None:
            raise self.lost
        self._waiting = {reply for reply in self._waiting if not reply.done()}
        self._waiting.add(reply)

    def await_closed(self, seconds: float) -> None:
        """Wait until it is closed, or ``seconds`` have passed."""
        self._gone.wait(seconds)

    def flush_and_close(self) -> None:
        """Close it, and wait until the broker has done all that came before."""
        if self.lost is None and self.connection.lost is None:
            try:
                self.call("basic_qos", prefetch_count=1)  # answered after all that came before
            except ProducerError:
                return
            self.close()

    def close(self) -> None:
        """Close it; nothing happens if it is lost."""

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
        else:  # with its connection, of which we are told after its channels
            self.lost = translate(error, self.connection.address, opened=True)
        for reply in list(self._waiting):
            reply.fail(self.lost)
        for function in self._on_lost:
            function(self.lost)
        self._gone.set()


class RawProperties(NamedTuple):
    """Properties for pika that are sent as the bytes they are: those of the class ``basic``."""

    data: bytes
    INDEX: int = 60

    def encode(self) -> list[bytes]:
        """What pika calls to send them."""
        return [self.data]
