"""The source of one generation: secures messages in bundles before it returns them.

:meth:`RabbitSource.receive` returns secured messages, and lets the consumer run ahead by the
    demand.  So ``secure`` has nothing to do, and ``stop`` returns the messages that were still
    under way.

The consumer runs in the connection's thread, the source in the run's thread.  They share one
buffer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery, Lease
from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq.amqp import properties as codec
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    MISSING,
    Attempts,
    Blocked,
    Channel,
    ConnectionThread,
    Refused,
    acknowledged_too_late,
    explained,
    keep_trying,
)
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.broker.checks import refuse_losses
from airflow_broadway.producers.rabbitmq.broker.holding_queues import EXCHANGE
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.marks import MARK, ORIGINAL
from airflow_broadway.producers.rabbitmq.options import FIELDS, RabbitMQOptions
from airflow_broadway.producers.rabbitmq.receive.consumer import Consumer
from airflow_broadway.producers.rabbitmq.receive.intake import Intake

log = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class MessageMaker:
    """Creates the messages of one generation, in the order of their positions.

    :param metadata: The names of their metadata fields.
    :param actions: ``on_success`` and ``on_failure`` of every message, if they override the
        pipeline's producer.
    """

    def __init__(
        self,
        generation: str,
        metadata: Sequence[str],
        clock: Clock,
        actions: Mapping[str, str],
    ) -> None:
        self._generation = generation
        self._actions = dict(actions)
        self._names = tuple(metadata)
        self._decodes = any(name in FIELDS or name == "persistent" for name in metadata)
        self._clock = clock
        self._position = 0
        #: Cached: messages of one publisher often have the same properties.
        self._text = lru_cache(maxsize=10_000)(codec.staged_text)

    def __call__(self, bundled: Iterable[Held]) -> list[Message]:
        """Converts bundled messages to messages of the pipeline."""
        now = self._clock.now()
        generation, text_of, describe = self._generation, self._text, self._describe
        actions = self._actions
        messages = []
        for position, message in enumerate(bundled, self._position):
            text = text_of(message.route, message.properties, message.redelivered)
            body = message.body
            messages.append(
                Message(
                    body,
                    metadata=describe(message),
                    acknowledger=AckRef(
                        None, generation, Delivery(payload=body, properties=text, **actions)
                    ),
                    message_id=message.message_id,
                    attempt=message.attempt,
                    redelivered=message.redelivered,
                    received_at=now,
                    position=position,
                    size=len(body),
                )
            )
        self._position += len(messages)
        return messages

    def _describe(self, message: Held) -> Mapping[str, Any]:
        """Returns the metadata of a message, as JSON values."""
        if not self._names:
            return _NOTHING
        values: dict[str, Any] = {}
        if self._decodes:
            try:
                values = codec.decode(message.properties)
            except ProducerError as error:
                return {"unreadable": str(error)}
        values["redelivered"] = message.redelivered
        values["persistent"] = values.pop("delivery_mode", 1) == 2
        values["exchange"], values["routing_key"] = split_route(message.route)
        headers = values.get("headers")
        if headers:
            values["headers"] = {k: v for k, v in headers.items() if k not in (MARK, ORIGINAL)}
        return {name: codec.json_value(values.get(name)) for name in self._names}


#: Seconds to wait for the confirmation that a channel is closed.
_CLOSE_TIMEOUT = 5.0


#: Seconds to wait for the first message of a non-empty queue, and for each further one.
_FIRST_TIMEOUT, _NEXT_TIMEOUT = 3.0, 0.2
#: Seconds after which a queue counts as quiet, even if its depth is not 0.
_QUIET_TIMEOUT = 20.0


class RabbitSource:
    """The source of one generation.

    The constructor connects, with the back-off's delays, within ``reconnect_timeout``.

    :param sweep: Releases the messages of dead generations; called before receiving.
    :raises ProducerUnavailable: If the broker cannot be reached in this time.
    :raises ProducerError: If the broker refuses.
    """

    _connection: ConnectionThread
    _consumer: Consumer

    def __init__(
        self,
        options: RabbitMQOptions,
        env: ProducerEnv,
        sweep: Callable[[ConnectionThread, StandingQueues, ProducerEnv], None],
    ) -> None:
        self._options = options
        self._env = env
        self._clock = env.clock
        self._intake = Intake(options, env)
        self._buffer = self._intake.buffer
        self._make = MessageMaker(
            env.generation, options.metadata, env.clock, options.actions_of_messages
        )
        self._address = address_for(options, env)
        #: The series of failures; it ends when a connection works.
        self._attempts = Attempts.of(options, env.clock, env.stopping)
        #: Whether the source queue had messages when this connection was opened.
        self._had_messages = False
        #: Whether callbacks are so slow that no delivery may wait unacknowledged.
        self._slow = False
        #: The number of ended channels that may have left unsecured bundles in the holding queue.
        self._uncertain_bundles = 0
        self._received = 0
        self._stopped = False
        self._closed = False
        self._connect_in_time()
        try:
            # Before receiving, and in empty runs too: the sweep releases dead runs' messages.
            refuse_losses(self._connection, options)
            sweep(self._connection, self._intake.queues, env)
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            self._connection.close()
            raise

    @property
    def lease(self) -> Lease:
        """The current lease; its state counts bundles and messages."""
        buffer, intake = self._buffer, self._intake
        with buffer.changed:
            state = {
                "queue": self._options.queue,
                "index": self._env.index,
                "holding_queue": intake.holding_queue,
                "virtual_host": self._address.virtual_host,
                "bundles": buffer.bundles,
                "messages": self._received,
                # Possible bundles that are not counted, and messages never returned to the run.
                "extra": self._uncertain_bundles + buffer.under_way,
            }
            if buffer.set_aside:
                state["set_aside"] = dict(buffer.set_aside)
        return Lease(
            kind=self._options.kind,
            generation=self._env.generation,
            seconds=self._options.lease,
            deadline=intake.deadline,
            owner=dict(self._env.owner),
            state=state,
        )

    # -- connecting ----------------------------------------------------------------------------

    def _ensure_connection(self) -> bool:
        """Reconnects after an error; does nothing without one.

        :returns: Whether there is a connection; ``False`` only if the run is stopping: it still
            publishes its results.
        :raises BroadwayError: If the error is permanent, or reconnecting fails.
        """
        error = self._buffer.error
        if error is None:
            return True
        try:
            self._reconnect(error)
        except ProducerUnavailable:
            if self._env.stopping():
                return False
            raise
        return True

    def _reconnect(self, error: BroadwayError) -> None:
        self._prepare_reconnect(error)
        log.warning("%s: unsecured messages are redelivered.", error)
        self._end_channel()
        self._connection.close()
        self._buffer.forget_unsecured()
        self._intake.ids.reconnect()
        self._attempts.again(error)
        self._intake.check_deadline()
        self._connect_in_time()
        log.info("Connected to RabbitMQ again.")

    def _connect_in_time(self) -> None:
        try:
            keep_trying(self._connect, self._attempts)
        except BroadwayError as error:
            self._buffer.fail(error)
            raise

    def _connect(self) -> None:
        self._buffer.begin()
        connection = ConnectionThread.to(self._address, on_lost=self._buffer.fail)
        try:
            channel = connection.channel()
            self._had_messages = _prepare_queue(self._options, connection, channel) > 0
            self._consumer = Consumer(channel, self._intake, slow=self._slow)
            self._connection = connection
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            connection.close()
            raise

    def _prepare_reconnect(self, error: BroadwayError) -> None:
        """Prepares for reconnecting after an error.

        :raises BroadwayError: If the error is permanent.
        """
        if isinstance(error, LeaseLapsed):
            self._intake.lapsed = error
        if isinstance(error, Refused):
            if acknowledged_too_late(error):
                self._slow = True
                return
            if error.code == MISSING and f"exchange '{EXCHANGE}'" in error.text:
                raise LeaseLapsed(
                    f"the exchange {EXCHANGE!r} was deleted while this run received: unsecured"
                    " messages stay in their queue; clear the task, which declares it again"
                ) from None
            raise explained(error, f"the queue {self._options.queue!r}") from None
        if isinstance(error, Blocked) or not isinstance(error, ProducerUnavailable):
            raise error

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if self._intake.lapsed is not None:
            raise self._intake.lapsed
        if demand < 1 or self._stopped:
            return []
        end = self._clock.monotonic() + max(timeout, self._least_timeout)
        last = end + _QUIET_TIMEOUT
        self._intake.check_deadline()
        while self._ensure_connection():
            self._request(demand)
            secured, quiet = self._wait(demand, end)
            if secured:
                self._attempts.worked()
                return self._to_messages(secured)
            if quiet:
                if self._clock.monotonic() > last or not self._has_more():
                    self._check_for_stream()
                    return []
                end = self._clock.monotonic() + _NEXT_TIMEOUT
            if self._buffer.error is None and self._wants_to_open:
                with self._suppress_if_lost():
                    self._open()
        return []

    @property
    def _least_timeout(self) -> float:
        """The minimum timeout in seconds: messages in the queue take a moment to arrive.

        With a shorter one, the queue would count as quiet.
        """
        if self._received:
            return _NEXT_TIMEOUT
        return _FIRST_TIMEOUT if self._had_messages else 0.0

    def _request(self, demand: int) -> None:
        """Requests that the consumer secure up to ``demand`` messages."""
        consumer = self._consumer
        if consumer.wants_journal:
            self._intake.turns.read(consumer.wants_journal)
            consumer.journal_read()
        self._buffer.demand(demand)
        self._connection.post(lambda: consumer.want(demand))

    def _wait(self, demand: int, end: float) -> tuple[list[Held], bool]:
        """Waits for work; returns the secured messages, and whether the wait timed out."""
        buffer = self._buffer
        with buffer.changed:
            while not self._has_work():
                left = end - self._clock.monotonic()
                if left <= 0 and buffer.under_way:  # delivered in time: waits for the confirm
                    left = self._confirm_timeout(end)
                if left <= 0:
                    return buffer.take(demand), True
                buffer.changed.wait(left)
            return buffer.take(demand), False

    def _has_work(self) -> bool:
        """Whether the run's thread has work."""
        buffer = self._buffer
        return bool(
            not buffer.empty
            or buffer.error is not None
            or self._consumer.wants_journal
            or self._wants_to_open
        )

    @property
    def _wants_to_open(self) -> bool:
        """Whether deliveries wait for a holding queue."""
        return bool(self._consumer.backlog) and not self._intake.holding_queue

    def _has_more(self) -> bool:
        """Whether messages are in the queue or under way."""
        consumer = self._consumer
        if consumer.stopped:
            return False
        # Twice: deliveries in transit during the first call have arrived after the second.
        for _ in range(2):
            try:
                declared = consumer.channel.call(
                    "queue_declare", queue=self._options.queue, passive=True
                )
            except ProducerError:  # raised at the next receive
                return False
            if declared.method.message_count:
                return True
        return bool(consumer.backlog or self._buffer.under_way or not self._buffer.empty)

    def _check_for_stream(self) -> None:
        """Refuses a stream, which looks like an empty queue; checked once a day.

        :raises ProducerError: If the queue is a stream.
        """
        now = self._clock.now().timestamp()
        if not self._received and not self._intake.journal.seen_type(now):
            with self._suppress_if_lost():
                refuse_stream(self._connection, self._options.queue)
                self._intake.journal.note_type(now)
        if self._buffer.error is None:
            self._attempts.worked()

    def _open(self) -> None:
        """Opens a holding queue, at the first message: an empty run declares nothing."""
        if self._intake.holding_queue:
            return
        connection, consumer = self._connection, self._consumer
        if consumer.may_be_stream:
            refuse_stream(connection, self._options.queue)
        self._intake.open(connection)
        connection.post(consumer.open)

    @contextmanager
    def _suppress_if_lost(self) -> Iterator[None]:
        """Suppresses errors of a lost connection: reconnecting resolves them."""
        try:
            yield
        except ProducerError:
            if self._buffer.error is None and self._connection.lost is None:
                raise

    def _to_messages(self, bundled: list[Held]) -> list[Message]:
        messages = self._make(bundled)
        self._received += len(messages)
        return messages

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> Sequence[Message]:
        if self._stopped:
            return []
        self._stopped = True
        self._buffer.demand(0)
        self._run_in_thread(self._consumer.stop)
        self._await_confirms()
        self._end_channel()
        secured = self._buffer.take_all()
        return self._to_messages(secured) if secured else []

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
        except BroadwayError as error:  # unconfirmed deliveries are not acknowledged either
            log.warning("The source could not be stopped: %s", error)
        self._connection.close()

    def _confirm_timeout(self, end: float) -> float:
        """Returns the seconds to wait for confirms that were due at ``end``.

        :raises ProducerUnavailable: If they are overdue, and the connection is not blocked.
        """
        left = end + self._address.timeout - self._clock.monotonic()
        if left > 0:
            return left
        if self._connection.blocked:  # the connection itself limits the time
            return 1.0
        raise ProducerUnavailable("RabbitMQ does not confirm publications in time")

    def _await_confirms(self) -> None:
        """Waits until all packed deliveries are secured, or cannot be any more."""
        clock, buffer = self._clock, self._buffer
        channel = self._consumer.confirm_channel
        end = clock.monotonic()
        with buffer.changed:
            while not (channel.idle or buffer.error or self._connection.lost):
                try:
                    left = self._confirm_timeout(end)
                except ProducerUnavailable as error:
                    log.warning("%s: unsecured messages are requeued.", error)
                    return
                if buffer.changed.wait(left):
                    end = clock.monotonic()

    def _end_channel(self) -> None:
        """Closes the consumer's channel: from now on no delivery is acknowledged."""
        channel = self._consumer.confirm_channel
        self._run_in_thread(channel.end)
        if self._connection.lost is None:
            channel.channel.await_closed(_CLOSE_TIMEOUT)
        self._uncertain_bundles += channel.uncertain

    def _run_in_thread(self, function: Callable[[], None]) -> None:
        """Calls ``function`` in the connection's thread, and waits for its end.

        Closes the connection on an error: the thread of a lost connection has ended.
        """
        try:
            self._connection.run(function)
        except ProducerError:
            self._connection.close()


# -- the source queue, which belongs to the user ---------------------------------------------------


def _prepare_queue(options: RabbitMQOptions, connection: ConnectionThread, channel: Channel) -> int:
    """Calls ``after_connect``, declares and binds the source queue; returns its depth.

    :raises ProducerUnavailable: If ``after_connect`` raises: it is retried.
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
    queue, subject = options.queue, f"the source queue {options.queue!r}"
    if options.declare is not None:
        connection.call(subject, "queue_declare", queue=queue, **dict(options.declare))
    for exchange, arguments in options.bindings:
        # Without a routing key pika would use the queue's name.
        bind_arguments = {"routing_key": "", **dict(arguments)}
        connection.call(subject, "queue_bind", queue=queue, exchange=exchange, **bind_arguments)
    return int(connection.call(subject, "queue_declare", queue=queue, passive=True).message_count)


def refuse_stream(connection: ConnectionThread, queue: str) -> None:
    """Refuses a stream: an ack does not remove its messages.

    Only a stream accepts an offset from its consumers.  The check needs no permission but to
    consume, and no message is delivered.

    :raises ProducerError: If the queue is a stream.
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
    except Refused:
        return  # not a stream; other refusals are reported elsewhere
    channel.close()
    raise ProducerError(
        f"{queue!r} is a stream: reading removes nothing from it, so there is nothing to"
        " settle; use a classic or quorum queue, fed by the same exchange"
    )
