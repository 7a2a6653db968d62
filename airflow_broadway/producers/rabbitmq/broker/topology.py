"""The queues of one producer: its source, and where the others of our own are to be found."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Channel, ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused, explained
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.broker.checks import act_on, check_queues, refuse_version
from airflow_broadway.producers.rabbitmq.broker.lease_queues import LeaseQueues
from airflow_broadway.producers.rabbitmq.broker.names import QueueNames
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, digest

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["Topology"]

log = logging.getLogger(__name__)

#: Seconds for which a look at the broker's policies counts.
_CHECK_INTERVAL = 600.0


class Topology:
    """The queues of one producer; calls answer when the broker has.

    :param journal: Where it is noted which of our queues are old enough to be relied on, whose each
        lease queue is, and when the broker's policies were looked at.
    """

    def __init__(self, options: RabbitMQOptions, journal: QueueJournal) -> None:
        self._options = options
        self._journal = journal
        self._exchanges: dict[str, str] = {}
        self.queues = QueueNames(options.queue)
        self.standing = StandingQueues(options, journal, self.queues)
        self.leases = LeaseQueues(options, journal, self.queues, self.standing)

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

    # -- the source ----------------------------------------------------------------------------

    def prepare(self, connection: ConnectionThread, channel: Channel) -> int:
        """Do what the options ask for, and see that the source queue is there; its depth.

        :raises ProducerUnavailable: If ``after_connect`` raises: it is called again later.
        :raises ProducerError: If it is not, or the broker refuses.
        """
        options = self._options
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
        queue = self.queues.source
        try:
            if options.declare is not None:
                channel.call("queue_declare", queue=queue, **dict(options.declare))
            for exchange, arguments in options.bindings:
                # Without a key pika would take the queue's name.
                bound = {"routing_key": "", **dict(arguments)}
                channel.call("queue_bind", queue=queue, exchange=exchange, **bound)
            declared = channel.call("queue_declare", queue=queue, passive=True)
        except Refused as error:
            raise explained(error, f"the source queue {queue!r}") from None
        return int(declared.method.message_count)

    def refuse_stream(self, connection: ConnectionThread) -> None:
        """Refuse to read a stream: what is acknowledged there is not removed.

        A stream alone takes an offset from its consumers; the answer needs no more permission than
        consuming does, and nothing is delivered for it.

        :raises ProducerError: If the source is one.
        """
        queue, channel = self.queues.source, connection.channel()
        try:
            channel.call("basic_qos", prefetch_count=1)
            channel.call(
                "basic_consume",
                queue=queue,
                on_message_callback=lambda *_: None,
                arguments={"x-stream-offset": "next"},
            )
        except Refused:
            return  # what else is refused is said where it matters
        channel.close()
        raise ProducerError(
            f"{queue!r} is a stream: reading removes nothing from it, so there is nothing to"
            " settle; use a classic or quorum queue, fed by the same exchange"
        )

    # -- our own -------------------------------------------------------------------------------

    def check(self, connection: ConnectionThread, generation: str, now: float) -> None:
        """See that no policy makes our queues lose messages, as far as the broker tells.

        Once in ten minutes for a queue, whatever came of it, unless that was an error: what an
        ordinary run pays for it is the reading of one small file.

        :param now: Seconds since the epoch.
        :raises ProducerError: If messages would be lost.
        """
        options, address = self._options, connection.address
        refuse_version(connection.version, options, address.shown)
        where = f"{address.shown} {address.virtual_host} {address.login} {address.management_url}"
        what = digest(f"{where} {options.lease} {options.queue_type} {self.dead}")
        last = self._journal.checked()
        if last.get("what") == what and 0 <= now - float(last.get("at", 0)) < _CHECK_INTERVAL:
            return
        lease = self.queues.lease(generation)
        if address.management_url == "":
            log.info("Policies are not checked: the connection's extra 'management_url' is false.")
        else:
            act_on(check_queues(options, address, version=connection.version, lease=lease))
        self._journal.note_checked(now, what)

    def open_lease(self, connection: ConnectionThread, generation: str) -> str:
        """A lease queue of the generation's own, and what is to be there with it; its name.

        :raises ProducerUnavailable: If the broker dies meanwhile.
        :raises ProducerError: If the broker refuses.
        """
        self.standing.ensure_returns(connection, rely=False)
        self.standing.ensure_dead(connection, rely=False)
        missing = self.dead[0] and self.missing_exchange(connection, self.dead[0])
        if missing:
            raise ProducerError(missing)
        name = self.leases.open(connection, generation)
        self.standing.rely(connection)
        return name
