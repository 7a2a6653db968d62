"""Sets aside the messages that no callback can handle, as dead letters."""

from __future__ import annotations

from typing import NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.marks import Mark, dead_lettered
from airflow_broadway.producers.rabbitmq.receive.ids import Ids


class Aside(NamedTuple):
    """A message that goes among the dead letters without being handled.

    :param kind: ``oversized`` or ``bundle``.
    """

    message_id: str
    kind: str
    reason: str


class Quarantine:
    """Publishes what is set aside, each message with why; for the connection's thread.

    :param dead: Exchange and routing key of dead letters.
    :param source: The queue that they come from.
    """

    def __init__(
        self, generation: str, ids: Ids, dead: tuple[str, str], source: str, clock: Clock
    ) -> None:
        self._generation = generation
        self._ids = ids
        self._dead = dead
        self._source = source
        self._clock = clock

    def unprocessed(
        self, channel: ConfirmChannel, delivered: Delivered, kind: str, reason: str
    ) -> None:
        """Make a dead letter of a message of the source queue that no callback can handle."""
        key = self._ids.fresh()
        properties = dead_lettered(
            delivered,
            Mark(key, self._generation, 1),
            reason=reason,
            stage="receive",
            extra={
                "x-broadway-queue": self._source,
                "x-broadway-dead-at": self._clock.now().isoformat(),
            },
            limit=channel.channel.connection.max_properties,
        )
        channel.publish(
            *self._dead,
            properties,
            delivered.body,
            key=key,
            tag=delivered.tag,
            load=Aside(key, kind, reason),
            elsewhere=True,
        )
