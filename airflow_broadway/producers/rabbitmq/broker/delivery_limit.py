"""The delivery limit of a queue: https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling.

A quorum queue drops or dead-letters a message that was returned to it more often than its limit.
The limit is an argument of the queue or of a policy, and since RabbitMQ 4 there is a default.
"""

from __future__ import annotations

from typing import Any, Final

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.address import Address
from airflow_broadway.producers.rabbitmq.broker.management import Management, Unseen

#: The limit of RabbitMQ 4 where nothing sets one.
DEFAULT_LIMIT: Final = 20


def delivery_limit(address: Address, queue: str, version: str) -> int | None:
    """The returns that a queue allows a message; ``None``: as many as there are.

    :param version: The broker's version, as the broker reports it.
    :raises ProducerError: If the management API does not show it.
    """
    try:
        known = Management(address).queue(queue)
    except Unseen as error:
        raise _unknown(queue, str(error)) from None
    if known is None:
        raise _unknown(queue, "the management API knows no such queue")
    return _limit_of(queue, known, version)


def _limit_of(queue: str, known: dict[str, Any], version: str) -> int | None:
    if known.get("type", "classic") != "quorum":
        return None
    if "effective_policy_definition" not in known and known.get("policy"):
        raise _unknown(queue, "the management API does not show the definition of its policy yet")
    declared = (known.get("arguments") or {}).get("x-delivery-limit")
    policy = (known.get("effective_policy_definition") or {}).get("delivery-limit")
    limits = [each for each in (declared, policy) if isinstance(each, int)]
    if version.partition(".")[0] in ("", "3"):
        # -1 is a limit here: the first return is one too many.
        return min(limits, default=None)
    finite = [each for each in limits if each >= 0]
    return min(finite) if finite else None if limits else DEFAULT_LIMIT


def _unknown(queue: str, why: str) -> ProducerError:
    return ProducerError(
        f"the dead letters in the queue {queue!r} cannot be listed: each look counts as a delivery,"
        f" and whether the queue has a delivery limit is not known ({why}); set the connection's"
        " extra 'management_url', or send back or delete all of them (--all)"
    )
