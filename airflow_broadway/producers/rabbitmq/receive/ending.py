"""How a source ends on a connection: what is under way is secured, or certain to go back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable, StagingError
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread, Reply
from airflow_broadway.producers.rabbitmq.receive.bundler import Ready

__all__ = ["await_confirms", "end_lanes", "in_thread", "patience"]

log = logging.getLogger(__name__)

#: Seconds for the broker to answer that channels are closed.
_CLOSED = 5.0


def patience(
    link: ConnectionThread, lanes: Sequence[ConfirmChannel], end: float, clock: Clock
) -> float:
    """Seconds to wait for confirms that were due at ``end``.

    :raises ProducerUnavailable: If they take too long, and nothing explains it.
    :raises StagingError: If it is the staging folder that takes too long: a bundle is published
        when its messages are there.
    """
    left = end + link.address.timeout - clock.monotonic()
    if left > 0:
        return left
    if link.blocked:  # for how long it may be is the link's to say
        return 1.0
    if any(lane.window.unpublished for lane in lanes):
        raise StagingError(
            "the staging folder takes too long to store what was received, though the connection's"
            f" timeout ({link.address.timeout:.0f} s) is over: look at its storage"
        )
    raise ProducerUnavailable("RabbitMQ does not confirm what was published to it")


def await_confirms(
    link: ConnectionThread, lanes: Sequence[ConfirmChannel], ready: Ready, clock: Clock
) -> None:
    """Wait until all that was taken is secured, as long as that may still be."""
    end = clock.monotonic()
    with ready.changed:
        while not (all(lane.window.idle for lane in lanes) or ready.error or link.lost):
            try:
                left = patience(link, lanes, end, clock)
            except (ProducerUnavailable, StagingError) as error:
                log.warning("%s: what is not secured goes back to its queue.", error)
                return
            if ready.changed.wait(left):
                end = clock.monotonic()


def end_lanes(link: ConnectionThread, lanes: Sequence[ConfirmChannel], clock: Clock) -> bool:
    """See to it that no confirm is heeded, and nothing acknowledged, from now on.

    :return: Whether the lease queue may hold a bundle that is not secured.
    """

    def end() -> None:
        for lane in lanes:
            lane.end()

    in_thread(link, end)
    last = clock.monotonic() + _CLOSED
    for lane in lanes:
        if link.lost is None:
            lane.channel.await_closed(max(0.0, last - clock.monotonic()))
    return any(lane.window.uncertain for lane in lanes)


def in_thread(link: ConnectionThread, function: Callable[[], None]) -> None:
    """Have ``function`` called in the link's thread, and wait for it.

    A link that is lost has no thread any more that could do anything.
    """

    def run(reply: Reply) -> None:
        function()
        reply.give()

    try:
        link.ask(run)
    except ProducerError:
        link.close()
