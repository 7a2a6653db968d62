"""The generation that receives, over all its connections: its lease, its bundles, its ids."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.broker.names import EXCHANGE
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import MAX_BYTES, Header, Held, pack
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, Turns
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions
from airflow_broadway.producers.rabbitmq.receive.buffer import Buffer
from airflow_broadway.producers.rabbitmq.receive.ids import Ids

#: A generation takes nothing more when this part of its lease is left.
_LEASE_MARGIN = 0.02


class Intake:
    """A generation that receives; for the run's thread, but for :meth:`publish`.

    :param env: Of the generation.
    """

    def __init__(self, options: RabbitMQOptions, env: ProducerEnv) -> None:
        self.options = options
        self.env = env
        self.journal = QueueJournal(env.staging, options.queue, env.shared)
        self.queues = StandingQueues(options, self.journal)
        self.buffer = Buffer()
        self.ids = Ids(secrets.token_hex(8))
        self.turns = Turns(self.journal)
        #: The holding queue; empty until it is opened: an empty run opens none.
        self.holding_queue = ""
        #: When the lease lapses, and why it is over, if it is.
        self.deadline = self._fresh_deadline()
        self.lapsed: LeaseLapsed | None = None
        #: Bytes of messages in a bundle; one larger message is a bundle of its own.
        self.capacity = min(MAX_BYTES, options.max_message_bytes)
        self._key = self.queues.names.key(env.generation)
        self._earlier = ""
        self._count = 0

    # -- the lease -----------------------------------------------------------------------------

    def open(self, connection: ConnectionThread) -> None:
        """Opens a holding queue.

        :raises LeaseLapsed: If the generation was released before it began.
        :raises ProducerError: If it is not to be relied on, or the broker refuses.
        """
        self.queues.prepare_dead(connection)
        self.deadline = self._fresh_deadline()
        generation = self.env.generation
        self.holding_queue = self.queues.holding.open(
            connection,
            self.queues.ensure_held,
            generation,
            pack(self._header(f"{generation}.0", 0), []),
            earlier=self._earlier,
            note=self._note,
        )

    def _note(self, name: str) -> None:
        """Notes the holding queue, before it is bound; then sees that nobody has released us."""
        self._earlier = name
        self.journal.note_opened(self.env.generation, name, self.deadline)
        if self.journal.is_over(self.env.generation):
            self.lapsed = LeaseLapsed(
                "this run's task was released before its first message, by a sweep or by hand:"
                " clear the task to receive again"
            )
            raise self.lapsed

    def check_deadline(self) -> None:
        """Sees that there is time left to receive.

        :raises LeaseLapsed: If there is not.
        """
        left = (self.deadline - self.env.clock.now()).total_seconds()
        if not self.holding_queue:  # what holds nothing cannot lapse
            self.deadline = self._fresh_deadline()
        elif left < self.options.lease * _LEASE_MARGIN:
            self.lapsed = LeaseLapsed(
                "this run's lease is about to end while it still receives messages: let it receive"
                " for a shorter time (max_seconds), or give the producer a longer lease"
            )
            raise self.lapsed

    def _fresh_deadline(self) -> datetime:
        return self.env.clock.now() + timedelta(seconds=self.options.lease)

    # -- bundles -------------------------------------------------------------------------------

    def publish(self, channel: ConfirmChannel, messages: list[Held], tag: int | None) -> None:
        """Secures ``messages``; then ``tag`` may be acknowledged.  For the connection's thread."""
        self._count += 1
        name = f"{self.ids.prefix}.{self._count:x}"
        body = pack(self._header(name, len(messages)), messages)
        kind = "application/x-broadway-bundle"
        properties = encode(content_type=kind, delivery_mode=2, message_id=name)
        channel.publish(EXCHANGE, self._key, properties, body, key=name, tag=tag, load=messages)

    def _header(self, bundle: str, count: int) -> Header:
        return Header(
            bundle=bundle,
            generation=self.env.generation,
            queue=self.options.queue,
            count=count,
            until=self.deadline.timestamp(),
            owner=dict(self.env.owner),
        )
