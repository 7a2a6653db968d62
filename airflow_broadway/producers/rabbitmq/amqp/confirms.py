"""A channel that publishes with confirms, and acknowledges deliveries once they are secured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.producers.rabbitmq.amqp.confirm_window import ConfirmWindow
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Channel, raw_properties
from airflow_broadway.producers.rabbitmq.amqp.properties import message_id_of

#: Names a publication by its properties, as the key under which it was published.
KeyOf = Callable[[bytes], str | None]


def select_confirms(
    channel: Channel,
    on_confirm: Callable[[int, bool, bool], None],
    on_return: Callable[[str | None, int, str], None],
    key_of: KeyOf,
) -> None:
    """Switch a channel to confirms.

    :param on_confirm: Called in the connection's thread with number, multiple, refused.
    :param on_return: Called in the connection's thread with key, code, text; before the confirm.
    """

    def answered(frame: Any) -> None:
        refused = frame.method.NAME == "Basic.Nack"
        on_confirm(frame.method.delivery_tag, frame.method.multiple, refused)

    def returned(code: int, text: str, properties: bytes) -> None:
        on_return(key_of(properties), code, text)

    connection, number = channel.connection, channel.number
    connection.post(lambda: connection.raw.frames.returned.__setitem__(number, returned))
    channel.call("confirm_delivery", ack_nack_callback=answered)


class ConfirmChannel:
    """Publishes what is made of deliveries, and acknowledges these once that is confirmed.

    All but the constructor is for the connection's thread.

    :param multiple: Whether all deliveries up to one are acknowledged together.
    :param secured: Called with the loads of what has just become certain, before their deliveries
        are acknowledged.
    :param failed: Called once, when nothing more may be taken.
    :param what: What bundles are published to, for errors.
    :param key_of: See :data:`KeyOf`; by default the property ``message_id``.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        multiple: bool,
        secured: Callable[[list[Any]], None],
        failed: Callable[[BroadwayError], None],
        what: str,
        key_of: KeyOf = message_id_of,
    ) -> None:
        self.channel = channel
        self.window = ConfirmWindow()
        self.failure: BroadwayError | None = None
        self._multiple = multiple
        self._secured = secured
        self._failed = failed
        self._what = what
        self._elsewhere: dict[str, str] = {}
        channel.on_lost(self.fail)
        select_confirms(channel, self._confirmed, self._returned, key_of)

    def publish(
        self,
        exchange: str,
        routing_key: str,
        properties: bytes,
        body: bytes,
        *,
        key: str,
        tag: int | None = None,
        load: Any = None,
        elsewhere: bool = False,
    ) -> None:
        """Publish what was made of deliveries.

        ``tag`` is acknowledged, and ``load`` handed over, when this and all before is confirmed.

        :param elsewhere: Whether the queue is no holding queue, for errors.
        """
        if self.failure is not None:
            return
        if elsewhere:
            self._elsewhere[key] = routing_key or exchange
        self.window.publish(key, tag, load)
        self.channel.raw.basic_publish(
            exchange, routing_key, body, raw_properties(properties), mandatory=True
        )

    def ack(self, tag: int) -> None:
        """Acknowledge one delivery that needs no securing."""
        if self.failure is None and self.channel.raw.is_open:
            self.channel.raw.basic_ack(tag)

    def requeue(self, tags: Iterable[int]) -> None:
        """Let the broker deliver these again."""
        if self.failure is None and self.channel.raw.is_open:
            for tag in tags:
                self.channel.raw.basic_nack(tag, requeue=True)

    def done(self, tag: int) -> None:
        """Acknowledge ``tag`` when all that was published so far is confirmed."""
        if not self.window.extend(tag) and self.failure is None and self.channel.raw.is_open:
            self._ack([tag])

    def end(self) -> None:
        """Take, publish and acknowledge nothing more; what is not acknowledged goes back."""
        if self.failure is None:
            self.failure = ProducerUnavailable("the source has stopped")
        if self.channel.raw.is_open:
            self.channel.raw.close()

    def fail(self, error: BroadwayError) -> None:
        """Take nothing more."""
        if self.failure is None:
            self.failure = error
            self._failed(error)

    def _returned(self, key: str | None, code: int, text: str) -> None:
        self.window.returned(key, f"{text} ({code})")

    def _confirmed(self, number: int, multiple: bool, refused: bool) -> None:
        self.window.confirmed(number, multiple, refused=refused)
        if self.failure is None and self.channel.raw.is_open:
            found = self.window.relied_on()
            if found:
                self._secured([load for _, load in found])
                self._ack([tag for tag, _ in found if tag is not None])
        if self.window.refused:
            self.fail(self._refusal(*next(iter(self.window.refused.items()))))

    def _ack(self, tags: list[int]) -> None:
        raw = self.channel.raw
        if not self._multiple:
            for tag in tags:
                raw.basic_ack(tag)
        elif tags:
            raw.basic_ack(tags[-1], multiple=True)

    def _refusal(self, key: str, reason: str) -> BroadwayError:
        other = self._elsewhere.get(key)
        if other is not None:
            return ProducerError(
                f"{other!r} takes no message that this run would set aside there: {reason}.  Make"
                " room, or create it; what is not secured stays in its queue"
            )
        return LeaseLapsed(
            f"{self._what} takes no more messages: {reason}.  This run's lease was ended,"
            " or its queue deleted or filled up; what is not secured stays in its queue"
        )
