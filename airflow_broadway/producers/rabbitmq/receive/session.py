"""A source's connection to the broker, and how another is made in the place of a lost one."""

from __future__ import annotations

import logging

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.backoff import Attempts, Backoff, keep_trying
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import (
    Blocked,
    Refused,
    acknowledged_too_late,
    explained,
    too_large,
)
from airflow_broadway.producers.rabbitmq.broker.names import EXCHANGE
from airflow_broadway.producers.rabbitmq.broker.source_queue import prepare
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, Turns
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions
from airflow_broadway.producers.rabbitmq.receive.buffer import Buffer
from airflow_broadway.producers.rabbitmq.receive.bundler import Bundler
from airflow_broadway.producers.rabbitmq.receive.consumer import Consumer
from airflow_broadway.producers.rabbitmq.receive.ending import (
    await_confirms,
    confirm_timeout,
    end_channel,
    in_thread,
)
from airflow_broadway.producers.rabbitmq.receive.ids import Ids
from airflow_broadway.producers.rabbitmq.receive.lease import OpenLease
from airflow_broadway.producers.rabbitmq.receive.marked import MarkedMessages
from airflow_broadway.producers.rabbitmq.receive.quarantine import Quarantine

log = logging.getLogger(__name__)


class Session:
    """The connection of one generation's source, with who reads on it; for the run's thread.

    It connects when it is made, by the back-off's delays, for as long as the options allow.

    :raises ProducerUnavailable: If the broker cannot be reached for so long.
    :raises ProducerError: If it refuses.
    """

    connection: ConnectionThread
    consumer: Consumer

    def __init__(
        self,
        options: RabbitMQOptions,
        env: ProducerEnv,
        topology: Topology,
        journal: QueueJournal,
        ids: Ids,
        lease: OpenLease,
        bundler: Bundler,
        buffer: Buffer,
    ) -> None:
        self.address = address_for(options, env)
        #: How often the holding queue was left with bundles that may be there, and are not secured.
        self.uncertain_bundles = 0
        #: Whether the source queue held messages when this connection was made.
        self.found_messages = False
        self._options = options
        self._generation = env.generation
        self._clock = env.clock
        self._journal = journal
        self._ids = ids
        self._lease = lease
        self._bundler = bundler
        self._buffer = buffer
        self._marked = MarkedMessages(env.generation, ids, Turns(journal))
        self._quarantine = Quarantine(env.generation, ids, topology.dead, options.queue, env.clock)
        self._attempts = Attempts(
            Backoff.of(options), options.reconnect_timeout, env.clock, env.stopping
        )
        self._slow = False
        self._connect_in_time()

    # -- connecting ----------------------------------------------------------------------------

    def ensure(self) -> None:
        """Go on after a lost connection; nothing happens if there is none lost.

        :raises BroadwayError: If another connection would not mend it, or none can be made.
        """
        error = self._buffer.error
        if error is None:
            return
        self._prepare_to_go_on(error)
        log.warning("%s: what is not secured yet is received again.", error)
        self._end_channel()
        self.connection.close()
        self._buffer.forget_unsecured()
        self._ids.reconnect()
        self._attempts.again(error)
        self._lease.check_deadline()
        self._connect_in_time()
        log.info("Connected to RabbitMQ again.")

    def worked(self) -> None:
        """The connection proved good: the next failure begins a stretch of its own."""
        self._attempts.worked()

    def _connect_in_time(self) -> None:
        try:
            keep_trying(self._connect, self._attempts)
        except BroadwayError as error:
            self._buffer.fail(error)
            raise

    def _connect(self) -> None:
        self._buffer.begin()
        connection = ConnectionThread.to(self.address, on_lost=self._buffer.fail)
        try:
            channel = connection.channel()
            self.found_messages = prepare(self._options, channel) > 0
            self.consumer = Consumer(
                channel,
                self._options,
                self._generation,
                self._ids,
                self._marked,
                self._quarantine,
                self._bundler,
                self._buffer,
                opened=self._lease.is_open,
                slow=self._slow,
            )
            self.connection = connection
        except BaseException:  # a kill too; raised again
            connection.close()
            raise

    def _prepare_to_go_on(self, error: BroadwayError) -> None:
        """Do what makes another connection succeed.

        :raises BroadwayError: If nothing does: the error.
        """
        if isinstance(error, LeaseLapsed):
            self._lease.note_lapsed(error)
        if isinstance(error, Refused):
            limit = too_large(error)
            if limit is not None:
                self._fit(limit)
                return
            if acknowledged_too_late(error):
                self._slow = True
                return
            if error.code == 404 and f"exchange '{EXCHANGE}'" in error.text:
                raise LeaseLapsed(
                    f"the exchange {EXCHANGE!r} was deleted while this run received: what is not"
                    " secured stays in its queue; clear the task, which declares it again"
                ) from None
            raise explained(error, f"the queue {self._options.queue!r}") from None
        if isinstance(error, Blocked) or not isinstance(error, ProducerUnavailable):
            raise error

    def _fit(self, limit: int) -> None:
        """Make bundles that a broker takes that has just refused one.

        :raises ProducerError: If there are none.
        """
        known = f"RabbitMQ takes no message of more than {limit} bytes (its max_message_size)"
        if not self._bundler.fit(limit, refused=True):
            raise ProducerError(f"{known}, which is too few even for one alone: raise it")
        log.warning(
            "%s: bundles are made no larger, and a larger message is a dead letter.  To have it"
            " handled, raise the limit.",
            known,
        )
        self._journal.note_limit(limit)

    # -- what the source waits for -------------------------------------------------------------

    def read_wanted_journal(self) -> None:
        """Read the journal that the consumer waits for, if any."""
        generation = self.consumer.wants_journal
        if generation:
            self._marked.read_journal(generation)
            self.consumer.journal_read()

    def want(self, demand: int) -> None:
        """Have the consumer take as much as is demanded."""
        consumer = self.consumer
        self.connection.post(lambda: consumer.want(demand))

    def confirm_timeout(self, end: float) -> float:
        """See :func:`~airflow_broadway.producers.rabbitmq.receive.ending.confirm_timeout`."""
        return confirm_timeout(self.connection, end, self._clock)

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take nothing more; what is under way is secured, or goes back."""
        in_thread(self.connection, self.consumer.stop)
        channel = self.consumer.confirm_channel
        await_confirms(self.connection, channel, self._buffer, self._clock)
        self._end_channel()

    def _end_channel(self) -> None:
        if end_channel(self.connection, self.consumer.confirm_channel, self._clock):
            self.uncertain_bundles += 1
