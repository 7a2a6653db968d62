"""What is asked of one queue, whichever it is: each call answers when the broker has."""

from __future__ import annotations

import time
from typing import Any

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused, explained
from airflow_broadway.producers.rabbitmq.amqp.get import Getter

#: Seconds from declaring a quorum queue until it is relied on.  RabbitMQ 3.10, killed within the
#: first second, forgets that it has the queue, and with it messages that it has confirmed (probed).
_RELIABLE_AGE = 2.0
#: Seconds that a queue which may be dead may take to answer.
_GET_TIMEOUT = 5.0


def await_age(age: float = 0.0) -> None:
    """Wait until a queue that was declared ``age`` seconds ago is old enough to be relied on."""
    time.sleep(min(_RELIABLE_AGE, max(0.0, _RELIABLE_AGE - age)))


def depth(connection: ConnectionThread, name: str) -> int | None:
    """Messages that are ready in a queue; ``None`` if there is no such queue."""
    channel = connection.channel()
    try:
        declared = channel.call("queue_declare", queue=name, passive=True)
    except Refused as error:
        if error.code == 404:
            return None
        raise explained(error, f"the queue {name!r}") from None
    channel.close()
    return int(declared.method.message_count)


def is_empty(connection: ConnectionThread, name: str) -> bool | None:
    """Whether there is nothing to get from a queue, by its own word; ``None`` if it says nothing.

    One that is dead, or slow to answer, has a :func:`depth` too: 0.  The connection may be lost by
    asking it.
    """
    try:
        getter = Getter(connection, name)
        empty = getter.get(_GET_TIMEOUT) is None
    except ProducerUnavailable:
        return None
    getter.close()
    return empty


def declare(connection: ConnectionThread, name: str, arguments: dict[str, Any]) -> None:
    """Declare a queue that is to be there already, or to be kept.

    :raises ProducerError: If it is there with other arguments.
    """
    channel = connection.channel()
    try:
        channel.call("queue_declare", queue=name, durable=True, arguments=arguments)
    except Refused as error:
        raise explained(error, f"the queue {name!r}") from None
    channel.close()


def delete(connection: ConnectionThread, name: str) -> None:
    """Delete a queue."""
    channel = connection.channel()
    try:
        channel.call("queue_delete", queue=name)
    except Refused as error:
        if error.code == 404:
            return
        raise explained(error, f"the queue {name!r}") from None
    channel.close()
