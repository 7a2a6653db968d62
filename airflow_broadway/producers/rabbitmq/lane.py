"""A channel that publishes with confirms, and acknowledges deliveries once they are secured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.producers.rabbitmq.link import Channel, raw_properties
from airflow_broadway.producers.rabbitmq.properties import decode, mark_of
from airflow_broadway.producers.rabbitmq.transfer import Window

__all__ = ["NO_ROUTE", "Lane", "confirming", "key_of"]

#: The reply code of a message that no queue took.
NO_ROUTE = 312


def key_of(properties: bytes) -> str | None:
    """What names a publication of ours: the id of its mark, else its own."""
    mark = mark_of(properties)
    if mark is not None:
        return mark.message_id
    try:
        found = decode(properties).get("message_id")
    except ProducerError:
        return None
    return None if found is None else str(found)


def confirming(
    channel: Channel,
    on_confirm: Callable[[int, bool, bool], None],
    on_return: Callable[[str | None, int, str], None],
) -> None:
    """Switch a channel to confirms.

    :param on_confirm: Called in the link's thread with number, multiple, refused.
    :param on_return: Called in the link's thread with key, code, text; before the confirm.
    """

    def answered(frame: Any) -> None:
        refused = frame.method.NAME == "Basic.Nack"
        on_confirm(frame.method.delivery_tag, frame.method.multiple, refused)

    def returned(code: int, text: str, properties: bytes) -> None:
        on_return(key_of(properties), code, text)

    link, number = channel.link, channel.number
    link.post(lambda: link.raw.returned.__setitem__(number, returned))
    channel.call("confirm_delivery", ack_nack_callback=answered)


class Lane:
    """One channel's confirm rule at work; all but the constructor is for the link's thread.

    :param multiple: Whether all deliveries up to one are acknowledged together.
    :param secured: Called with the loads of what may newly be relied on, just before their
        deliveries are acknowledged.
    :param failed: Called once, when nothing more may be taken.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        multiple: bool,
        secured: Callable[[list[Any]], None],
        failed: Callable[[BroadwayError], None],
        what: str,
    ) -> None:
        self.channel = channel
        self.window = Window()
        self.failure: BroadwayError | None = None
        self._multiple = multiple
        self._secured = secured
        self._failed = failed
        self._what = what
        channel.on_lost(self.fail)
        confirming(channel, self._confirmed, self._returned)

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
    ) -> None:
        """Publish, and acknowledge ``tag`` when this and all before may be relied on."""
        if self.failure is not None:
            return
        self.window.publish(key, tag, load)
        self.channel.raw.basic_publish(
            exchange, routing_key, body, raw_properties(properties), mandatory=True
        )

    def ack(self, tag: int) -> None:
        """Acknowledge one delivery that needs no securing."""
        if self.failure is None and self.channel.raw.is_open:
            self.channel.raw.basic_ack(tag)

    def done(self, tag: int) -> None:
        """Acknowledge ``tag`` when all that was published so far may be relied on."""
        if not self.window.extend(tag):
            self.ack(tag)

    def fail(self, error: BroadwayError) -> None:
        """Take nothing more."""
        if self.failure is None:
            self.failure = error
            self._failed(error)

    def _returned(self, key: str | None, code: int, text: str) -> None:
        self.window.returned(key, f"{text} ({code})")

    def _confirmed(self, number: int, multiple: bool, refused: bool) -> None:
        self.window.confirmed(number, multiple, refused=refused)
        found = self.window.relied_on()
        if found and self.failure is None and self.channel.raw.is_open:
            self._secured([load for _, load in found])
            tags = [tag for tag, _ in found if tag is not None]
            if self._multiple:
                if tags:
                    self.channel.raw.basic_ack(tags[-1], multiple=True)
            else:
                for tag in tags:
                    self.channel.raw.basic_ack(tag)
        if self.window.refused:
            reason = next(iter(self.window.refused.values()))
            self.fail(
                LeaseLapsed(
                    f"{self._what} takes no more messages: {reason}.  This run's lease was ended,"
                    " or its queue deleted or filled up; what is not secured stays in its queue"
                )
            )
