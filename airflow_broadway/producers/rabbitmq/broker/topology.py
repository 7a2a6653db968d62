"""The queues of our own of one producer, and where its dead letters go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused, explained
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.broker.checks import LossCheck
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueues
from airflow_broadway.producers.rabbitmq.broker.names import QueueNames
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.journal import QueueJournal

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions


class Topology:
    """Those queues; calls answer when the broker has.

    :param journal: Where it is noted which of them are old enough to be relied on.
    """

    def __init__(self, options: RabbitMQOptions, journal: QueueJournal) -> None:
        self._options = options
        self._journal = journal
        self._exchanges: dict[str, str] = {}
        self._losses = LossCheck(options)
        self.queues = QueueNames(options.queue)
        self.standing = StandingQueues(options, journal, self.queues)
        self.holding = HoldingQueues(self.queues)

    @property
    def dead(self) -> tuple[str, str]:
        """Exchange and routing key of dead letters."""
        place = self._options.dead_letter
        if place is None:
            return "", self.queues.dead
        if isinstance(place, str):
            return "", place
        return str(place.get("exchange", "")), str(place.get("routing_key", ""))

    def dead_for(self, route: bytes) -> tuple[str, str]:
        """Exchange and routing key of the dead letter of a message that came by ``route``."""
        place = self._options.dead_letter
        exchange, key = self.dead
        if isinstance(place, Mapping) and "routing_key" not in place:
            key = split_route(route)[1]
        return exchange, key

    def missing_exchange(self, connection: ConnectionThread, name: str) -> str:
        """Why an exchange cannot take dead letters; empty if it can."""
        if name not in self._exchanges:
            channel = connection.channel()
            why = ""
            try:
                channel.call("exchange_declare", exchange=name, passive=True)
                channel.close()
            except Refused as error:
                why = str(explained(error, f"the exchange {name!r} of dead letters"))
            self._exchanges[name] = why
        return self._exchanges[name]

    def why_lossy(self, connection: ConnectionThread, queue: str) -> str:
        """Why a policy makes the broker lose what goes into a queue of ours; empty if none does."""
        return self._losses.reason(connection.address, queue)

    def prepare_dead(self, connection: ConnectionThread) -> None:
        """See that dead letters can be published.

        :raises ProducerError: If they cannot.
        """
        self.standing.ensure_dead(connection)
        missing = self.dead[0] and self.missing_exchange(connection, self.dead[0])
        if missing:
            raise ProducerError(missing)
