"""The RabbitMQ producer of a pipeline: opens its source and its custodian."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, QueueDepth, Source
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.identity import MESSAGE_ID, digest
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

log = logging.getLogger(__name__)


@options
class RabbitMQProducer(RabbitMQOptions):
    """Receives messages from a RabbitMQ queue: see ``docs/rabbitmq.md``.

    ``on_success`` and ``on_failure`` take Broadway's values.  ``"ack"`` acknowledges, ``"reject"``
    dead-letters.  ``"reject_and_requeue"`` requeues immediately, after every failure.
    ``"reject_and_requeue_once"`` requeues after the first failure, then dead-letters.  Other values
    are ``"retry"`` (by the option ``retry``), ``"dead_letter"`` and ``"noop"``, which redelivers a
    message at the end of the lease.
    """

    def source(self, env: ProducerEnv) -> Source:
        from airflow_broadway.producers.rabbitmq.receive.source import RabbitSource
        from airflow_broadway.producers.rabbitmq.settle.settlement import sweep

        merged = self.merged(env.index)
        if "on_failure" in getattr(merged, "_auto", ()):
            log.warning(
                "RabbitMQProducer.on_failure should be specified: by default,"
                " 'reject_and_requeue', a message that always fails is retried in every run; most"
                " pipelines want 'retry'."
            )
        return RabbitSource(merged, env, sweep)

    def custodian(self, env: ProducerEnv) -> Custodian:
        from airflow_broadway.producers.rabbitmq.settle.custodian import RabbitCustodian

        return RabbitCustodian(self, env)

    def check(self, env: ProducerEnv) -> list[Finding]:
        from airflow_broadway.producers.rabbitmq.broker.checks import check

        return check(self, env)

    def depth(self, env: ProducerEnv) -> QueueDepth:
        from airflow_broadway.producers.rabbitmq.broker.checks import depth

        return depth(self.shards(), env)

    def console(self, env: ProducerEnv) -> str | None:
        from airflow_broadway.producers.rabbitmq.amqp.address import address_for

        merged = self.shards()[0]
        address = address_for(merged, env)
        if not address.management_url:  # another program may use its default port
            return None
        path = f"{quote(address.virtual_host, safe='')}/{quote(merged.queue, safe='')}"
        return f"{address.management_url.rstrip('/')}/#/queues/{path}"

    def datasets(self, env: ProducerEnv) -> Sequence[tuple[str, str]]:
        from airflow_broadway.producers.rabbitmq.amqp.address import address_for

        addresses = [(shard.queue, address_for(shard, env)) for shard in self.shards()]
        return [
            (f"amqp://{address.netloc}", f"{address.virtual_host}/{queue}".lstrip("/"))
            for queue, address in addresses
        ]

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        from airflow_broadway.producers.rabbitmq.letters import RabbitDeadLetters

        return RabbitDeadLetters(self.shards(), env, place)

    # -- identity ------------------------------------------------------------------------------

    def identity_of(self, message: Message) -> str | None:
        if self.message_identity in (None, MESSAGE_ID):
            return digest(MESSAGE_ID, _properties_of(message).get("message_id"))
        return super().identity_of(message)

    def header_of(self, message: Message, name: str) -> Any:
        return (_properties_of(message).get("headers") or {}).get(name)

    # -- verdicts ------------------------------------------------------------------------------

    def judge(self, facts: Facts) -> Verdict:
        name = facts.name
        if name == "reject_and_requeue_once":
            # By the attempt: the broker also sets "redelivered" on messages that a run prefetched
            # and requeued unhandled.
            name = "reject" if facts.attempt > 1 else "reject_and_requeue"
        if name == "reject_and_requeue":
            return Verdict(Action.RETRY, 0.0, facts.reason, facts.stage)
        return super().judge(facts._replace(name=name))


def _properties_of(message: Message) -> dict[str, Any]:
    """Returns the AMQP properties of a received message; none if they cannot be decoded."""
    from airflow_broadway.producers.rabbitmq.amqp import properties

    try:
        return properties.decode(
            properties.staged_delivery(message.acknowledger.data.properties)[1]
        )
    except ProducerError:
        return {}
