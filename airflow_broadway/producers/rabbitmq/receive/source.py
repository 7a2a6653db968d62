"""The half that receives: secured in bundles before it is handed out.

:meth:`RabbitSource.receive` returns what is secured already, and lets the consumer run ahead by as
much as was demanded; so ``secure`` has nothing left to do, and ``stop`` brings in what is still on
its way.

Three parts have a state of their own: the session is the connection and who reads on it, the lease
says where the generation's messages are held and until when, and here is what was handed out.
Between them is one buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.checks import refuse_losses
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions
from airflow_broadway.producers.rabbitmq.receive.intake import Intake
from airflow_broadway.producers.rabbitmq.receive.messages import MessageMaker
from airflow_broadway.producers.rabbitmq.receive.session import Session, refuse_stream

log = logging.getLogger(__name__)

#: Seconds that the first message of a queue that is not empty may take, and those that follow.
_FIRST_TIMEOUT, _NEXT_TIMEOUT = 3.0, 0.2
#: Seconds after which a queue counts as quiet, even if it says that it holds messages.
_QUIET_TIMEOUT = 20.0


class RabbitSource:
    """Receives for one generation.

    :param sweep: Releases what dead generations hold, before anything is received.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        env: ProducerEnv,
        sweep: Callable[[ConnectionThread, StandingQueues, ProducerEnv], None],
    ) -> None:
        self._options = options
        self._env = env
        self._clock = env.clock
        intake = Intake(options, env)
        self._buffer = intake.buffer
        self._intake = intake
        self._make = MessageMaker(
            env.generation, options.metadata, env.clock, options.actions_of_messages
        )
        self._handed = 0
        self._stopped = False
        self._closed = False
        self._session = Session(intake)
        connection = self._session.connection
        try:
            # First, of an empty run too: the sweep moves what a dead run holds.
            refuse_losses(connection, options)
            sweep(connection, intake.queues, env)
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            connection.close()
            raise

    @property
    def lease(self) -> Lease:
        """The lease as of now; its state counts what was handed out."""
        buffer, intake = self._buffer, self._intake
        with buffer.changed:
            state = {
                "queue": self._options.queue,
                "index": self._env.index,
                "holding_queue": intake.holding_queue,
                "virtual_host": self._session.address.virtual_host,
                "bundles": buffer.bundles,
                "messages": self._handed,
                # Bundles that may be there beside those counted, and messages never handed out.
                "extra": self._session.uncertain_bundles + buffer.under_way,
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

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if self._intake.lapsed is not None:
            raise self._intake.lapsed
        if demand < 1 or self._stopped:
            return []
        end = self._clock.monotonic() + max(timeout, self._least_timeout)
        last = end + _QUIET_TIMEOUT
        self._intake.check_deadline()
        while self._session.ensure():
            self._ask_for(demand)
            held, quiet = self._wait(demand, end)
            if held:
                self._session.attempts.worked()
                return self._messages(held)
            if quiet:
                if self._clock.monotonic() > last or not self._more_to_come():
                    self._see_why_nothing_came()
                    return []
                end = self._clock.monotonic() + _NEXT_TIMEOUT
            if self._buffer.error is None and self._wants_to_open:
                with self._unless_lost():
                    self._open()
        return []

    @property
    def _least_timeout(self) -> float:
        """Seconds to wait at least: what lies in the queue takes a moment to come.

        A shorter timeout would call it quiet.
        """
        if self._handed:
            return _NEXT_TIMEOUT
        return _FIRST_TIMEOUT if self._session.found_messages else 0.0

    def _ask_for(self, demand: int) -> None:
        """Have up to ``demand`` messages secured."""
        consumer = self._session.consumer
        if consumer.wants_journal:
            self._intake.turns.read(consumer.wants_journal)
            consumer.journal_read()
        self._buffer.demand(demand)
        self._session.connection.post(lambda: consumer.want(demand))

    def _wait(self, demand: int, end: float) -> tuple[list[Held], bool]:
        """Wait until there is something to do; what is secured, and whether nothing happened."""
        buffer = self._buffer
        with buffer.changed:
            while not self._has_work():
                left = end - self._clock.monotonic()
                if left <= 0 and buffer.under_way:  # arrived in time: its confirm is awaited
                    left = self._session.confirm_timeout(end)
                if left <= 0:
                    return buffer.take(demand), True
                buffer.changed.wait(left)
            return buffer.take(demand), False

    def _has_work(self) -> bool:
        """Whether the run's thread has something to do."""
        buffer, session = self._buffer, self._session
        return bool(
            not buffer.empty
            or buffer.error is not None
            or session.consumer.wants_journal
            or self._wants_to_open
        )

    @property
    def _wants_to_open(self) -> bool:
        """Whether deliveries wait for a holding queue."""
        return bool(self._session.consumer.backlog) and not self._intake.holding_queue

    def _more_to_come(self) -> bool:
        """Whether messages are in the queue, or on their way, that only take their time to come."""
        consumer = self._session.consumer
        if consumer.stopped:
            return False
        # Twice: deliveries that were under way during the first are here after the second.
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

    def _see_why_nothing_came(self) -> None:
        """Refuse a stream, which looks like an empty queue: asked once a day.

        :raises ProducerError: If the queue is one.
        """
        now = self._clock.now().timestamp()
        if not self._handed and not self._intake.journal.seen_type(now):
            with self._unless_lost():
                refuse_stream(self._session.connection, self._options.queue)
                self._intake.journal.note_type(now)
        if self._buffer.error is None:
            self._session.attempts.worked()

    def _open(self) -> None:
        """Open a holding queue: at the first message, so that an empty run declares nothing."""
        if self._intake.holding_queue:
            return
        connection, consumer = self._session.connection, self._session.consumer
        if consumer.may_be_stream:
            refuse_stream(connection, self._options.queue)
        self._intake.open(connection)
        connection.post(consumer.open)

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Let errors pass of a connection that is lost: connecting again mends them."""
        try:
            yield
        except ProducerError:
            if self._buffer.error is None and self._session.connection.lost is None:
                raise

    def _messages(self, held: list[Held]) -> list[Message]:
        made = self._make(held)
        self._handed += len(made)
        return made

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> Sequence[Message]:
        if self._stopped:
            return []
        self._stopped = True
        self._buffer.demand(0)
        self._session.stop()
        held = self._buffer.take_all()
        return self._messages(held) if held else []

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
        except BroadwayError as error:  # what it does not confirm is not acknowledged either
            log.warning("The source could not be stopped: %s", error)
        self._session.connection.close()
