"""How a source ends on a connection: what is under way is secured, or certain to go back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread, Reply
from airflow_broadway.producers.rabbitmq.receive.buffer import Buffer

log = logging.getLogger(__name__)

#: Seconds for the broker to answer that channels are closed.
_CLOSE_TIMEOUT = 5.0


def confirm_timeout(connection: ConnectionThread, end: float, clock: Clock) -> float:
    """Seconds to wait for confirms that were due at ``end``.

    :raises ProducerUnavailable: If they take too long, and nothing explains it.
    """
    left = end + connection.address.timeout - clock.monotonic()
    if left > 0:
        return left
    if connection.blocked:  # for how long it may be is the connection's to say
        return 1.0
    raise ProducerUnavailable("RabbitMQ does not confirm what was published to it")


def await_confirms(
    connection: ConnectionThread, channel: ConfirmChannel, buffer: Buffer, clock: Clock
) -> None:
    """Wait until all that was taken is secured, as long as that may still be."""
    end = clock.monotonic()
    with buffer.changed:
        while not (channel.window.idle or buffer.error or connection.lost):
            try:
                left = confirm_timeout(connection, end, clock)
            except ProducerUnavailable as error:
                log.warning("%s: what is not secured goes back to its queue.", error)
                return
            if buffer.changed.wait(left):
                end = clock.monotonic()


def end_channel(connection: ConnectionThread, channel: ConfirmChannel, clock: Clock) -> bool:
    """See to it that no confirm is heeded, and nothing acknowledged, from now on.

    :return: Whether the holding queue may have a bundle that is not secured.
    """
    in_thread(connection, channel.end)
    if connection.lost is None:
        channel.channel.await_closed(_CLOSE_TIMEOUT)
    return channel.window.uncertain


def in_thread(connection: ConnectionThread, function: Callable[[], None]) -> None:
    """Have ``function`` called in the connection's thread, and wait for it.

    A connection that is lost has no thread any more that could do anything.
    """

    def run(reply: Reply) -> None:
        function()
        reply.give()

    try:
        connection.ask(run)
    except ProducerError:
        connection.close()
