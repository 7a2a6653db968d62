"""A source's connection to the broker, and how another is made in the place of a lost one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.producers.rabbitmq.amqp import errors
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.backoff import Attempts, keep_trying
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    Channel,
    ConnectionThread,
)
from airflow_broadway.producers.rabbitmq.broker.names import EXCHANGE
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions
from airflow_broadway.producers.rabbitmq.receive.consumer import Consumer
from airflow_broadway.producers.rabbitmq.receive.intake import Intake

log = logging.getLogger(__name__)

#: Seconds for the broker to answer that channels are closed.
_CLOSE_TIMEOUT = 5.0


class Session:
    """The connection of one generation's source, with who reads on it; for the run's thread.

    It connects when it is made, by the back-off's delays, for as long as the options allow.

    :raises ProducerUnavailable: If the broker cannot be reached for so long.
    :raises ProducerError: If it refuses.
    """

    connection: ConnectionThread
    consumer: Consumer

    def __init__(self, intake: Intake) -> None:
        options, env = intake.options, intake.env
        self.address = address_for(options, env)
        #: How often the holding queue was left with bundles that may be there, and are not secured.
        self.uncertain_bundles = 0
        #: Whether the source queue held messages when this connection was made.
        self.found_messages = False
        #: One stretch of failures; it ends when the connection proves good.
        self.attempts = Attempts.of(options, env.clock, env.stopping)
        self._intake = intake
        self._slow = False
        self._connect_in_time()

    # -- connecting ----------------------------------------------------------------------------

    def ensure(self) -> bool:
        """Goes on after a lost connection; nothing happens if there is none lost.

        :returns: Whether there is a connection: if none can be made, and the run was told to stop,
            what was received is still to be published.
        :raises BroadwayError: If another connection would not mend it, or none can be made.
        """
        error = self._intake.buffer.error
        if error is None:
            return True
        try:
            self._reconnect(error)
        except ProducerUnavailable:
            if self._intake.env.stopping():
                return False
            raise
        return True

    def _reconnect(self, error: BroadwayError) -> None:
        self._prepare_to_go_on(error)
        log.warning("%s: what is not secured yet is received again.", error)
        self._end_channel()
        self.connection.close()
        self._intake.buffer.forget_unsecured()
        self._intake.ids.reconnect()
        self.attempts.again(error)
        self._intake.check_deadline()
        self._connect_in_time()
        log.info("Connected to RabbitMQ again.")

    def _connect_in_time(self) -> None:
        try:
            keep_trying(self._connect, self.attempts)
        except BroadwayError as error:
            self._intake.buffer.fail(error)
            raise

    def _connect(self) -> None:
        self._intake.buffer.begin()
        connection = ConnectionThread.to(self.address, on_lost=self._intake.buffer.fail)
        try:
            channel = connection.channel()
            self.found_messages = _prepare(self._intake.options, connection, channel) > 0
            self.consumer = Consumer(channel, self._intake, slow=self._slow)
            self.connection = connection
        except BaseException:  # a kill too; raised again
            connection.close()
            raise

    def _prepare_to_go_on(self, error: BroadwayError) -> None:
        """Do what makes another connection succeed.

        :raises BroadwayError: If nothing does: the error.
        """
        if isinstance(error, LeaseLapsed):
            self._intake.lapsed = error
        if isinstance(error, errors.Refused):
            if errors.acknowledged_too_late(error):
                self._slow = True
                return
            if error.code == errors.MISSING and f"exchange '{EXCHANGE}'" in error.text:
                raise LeaseLapsed(
                    f"the exchange {EXCHANGE!r} was deleted while this run received: what is not"
                    " secured stays in its queue; clear the task, which declares it again"
                ) from None
            raise errors.explained(error, f"the queue {self._intake.options.queue!r}") from None
        if isinstance(error, errors.Blocked) or not isinstance(error, ProducerUnavailable):
            raise error

    # -- what the source waits for -------------------------------------------------------------

    def confirm_timeout(self, end: float) -> float:
        """See :func:`confirm_timeout`."""
        return confirm_timeout(self.connection, end, self._intake.env.clock)

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Takes nothing more; what is under way is secured, or goes back."""
        self._in_thread(self.consumer.stop)
        self._await_confirms()
        self._end_channel()

    def _await_confirms(self) -> None:
        """Waits until all that was taken is secured, as long as that may still be."""
        clock, buffer = self._intake.env.clock, self._intake.buffer
        window = self.consumer.confirm_channel.window
        end = clock.monotonic()
        with buffer.changed:
            while not (window.idle or buffer.error or self.connection.lost):
                try:
                    left = self.confirm_timeout(end)
                except ProducerUnavailable as error:
                    log.warning("%s: what is not secured goes back to its queue.", error)
                    return
                if buffer.changed.wait(left):
                    end = clock.monotonic()

    def _end_channel(self) -> None:
        """Sees to it that no confirm is heeded, and nothing acknowledged, from now on."""
        channel = self.consumer.confirm_channel
        self._in_thread(channel.end)
        if self.connection.lost is None:
            channel.channel.await_closed(_CLOSE_TIMEOUT)
        self.uncertain_bundles += channel.window.uncertain

    def _in_thread(self, function: Callable[[], None]) -> None:
        """Has ``function`` called in the connection's thread, and waits for it.

        A connection that is lost has no thread any more that could do anything.
        """
        try:
            self.connection.run(function)
        except ProducerError:
            self.connection.close()


def confirm_timeout(connection: ConnectionThread, end: float, clock: Clock) -> float:
    """Returns the seconds to wait for confirms that were due at ``end``.

    :raises ProducerUnavailable: If they take too long, and nothing explains it.
    """
    left = end + connection.address.timeout - clock.monotonic()
    if left > 0:
        return left
    if connection.blocked:  # for how long it may be is the connection's to say
        return 1.0
    raise ProducerUnavailable("RabbitMQ does not confirm what was published to it")


# -- the source queue: a user's own, so little is done to it ---------------------------------------


def _prepare(options: RabbitMQOptions, connection: ConnectionThread, channel: Channel) -> int:
    """Does what the options ask for, and sees that the source queue exists; returns its depth.

    :raises ProducerUnavailable: If ``after_connect`` raises: it is called again later.
    :raises ProducerError: If the queue does not exist, or the broker refuses.
    """
    if options.after_connect is not None:
        try:
            returned = options.after_connect(channel)
        except Exception as error:
            raise ProducerUnavailable(
                f"after_connect raised {type(error).__name__}: {error}"
            ) from error
        if inspect.isawaitable(returned) or returned not in (None, True):
            raise ProducerError(
                f"after_connect must return None, or raise to refuse; it returned {returned!r}"
            )
    queue, what = options.queue, f"the source queue {options.queue!r}"
    if options.declare is not None:
        connection.call(what, "queue_declare", queue=queue, **dict(options.declare))
    for exchange, arguments in options.bindings:
        # Without a key pika would take the queue's name.
        bound = {"routing_key": "", **dict(arguments)}
        connection.call(what, "queue_bind", queue=queue, exchange=exchange, **bound)
    return int(connection.call(what, "queue_declare", queue=queue, passive=True).message_count)


def refuse_stream(connection: ConnectionThread, queue: str) -> None:
    """Refuses to read a stream: what is acknowledged there is not removed.

    A stream alone takes an offset from its consumers; the answer needs no more permission than
    consuming does, and nothing is delivered for it.

    :raises ProducerError: If the queue is one.
    """
    channel = connection.channel()
    try:
        channel.call("basic_qos", prefetch_count=1)
        channel.call(
            "basic_consume",
            queue=queue,
            on_message_callback=lambda *_: None,
            arguments={"x-stream-offset": "next"},
        )
    except errors.Refused:
        return  # what else is refused is said where it matters
    channel.close()
    raise ProducerError(
        f"{queue!r} is a stream: reading removes nothing from it, so there is nothing to"
        " settle; use a classic or quorum queue, fed by the same exchange"
    )
