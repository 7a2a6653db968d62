"""Sets aside what a run does not handle: dead letters, and what cannot be read at all."""

from __future__ import annotations

from typing import Any, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.marks import Content, Mark, dead_lettered
from airflow_broadway.producers.rabbitmq.receive.ids import Ids

__all__ = ["Aside", "Quarantine"]


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
        aside = Aside(key, kind, reason)
        mark = Mark(key, self._generation, 1)
        self._publish(channel, self._dead, delivered, mark, reason, "receive", delivered.tag, aside)

    def unreadable(
        self, channel: ConfirmChannel, queue: str, delivered: Delivered, reason: str
    ) -> None:
        """Move what is no bundle from the returns queue to another."""
        mark = Mark(self._ids.fresh(), self._generation, 1)
        self._publish(channel, ("", queue), delivered, mark, reason, "returns", delivered.tag, None)

    def _publish(
        self,
        channel: ConfirmChannel,
        place: tuple[str, str],
        message: Content,
        mark: Mark,
        reason: str,
        stage: str,
        tag: int | None,
        load: Any,
    ) -> None:
        limit = channel.channel.connection.max_properties
        extra = {
            "x-broadway-queue": self._source,
            "x-broadway-dead-at": self._clock.now().isoformat(),
        }
        properties = dead_lettered(
            message, mark, reason=reason, stage=stage, extra=extra, limit=limit
        )
        channel.publish(*place, properties, message.body, key=mark.message_id, tag=tag, load=load)
