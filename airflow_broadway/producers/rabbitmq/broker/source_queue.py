"""The queue that a run takes its messages from: a user's own, so little is done to it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Channel, ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused, explained

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions


def prepare(options: RabbitMQOptions, channel: Channel) -> int:
    """Do what the options ask for, and see that the source queue is there; its depth.

    :raises ProducerUnavailable: If ``after_connect`` raises: it is called again later.
    :raises ProducerError: If the queue is not there, or the broker refuses.
    """
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
    queue = options.queue
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


def refuse_stream(connection: ConnectionThread, queue: str) -> None:
    """Refuse to read a stream: what is acknowledged there is not removed.

    A stream alone takes an offset from its consumers; the answer needs no more permission than
    consuming does, and nothing is delivered for it.

    :raises ProducerError: If the queue is one.
    """
    channel = connection.channel()
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
