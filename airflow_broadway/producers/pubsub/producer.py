"""Pub/Sub as a pipeline's producer: opens the half that receives and the half that settles."""

from __future__ import annotations

import os
from collections.abc import Mapping

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, QueueDepth, Source
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = ["PubSubProducer"]


@options
class PubSubProducer(PubSubOptions):
    """Messages from a pull subscription of Google Cloud Pub/Sub: see ``docs/pubsub.md``.

    ``on_success`` and ``on_failure`` take Broadway's values: ``"ack"``; ``"noop"``, after which the
    message comes again once its lease is over; ``"nack"`` and ``("nack", seconds)``, after which it
    comes again at once or then, as often as Pub/Sub's own dead-letter policy allows.  Beside them
    ``"retry"`` (by the option ``retry``), ``"dead_letter"`` and ``"release"``, at once and without
    using up an attempt.
    """

    def source(self, env: ProducerEnv) -> Source:
        from airflow_broadway.producers.pubsub.source import PubSubSource

        return PubSubSource(self, env)

    def custodian(self, env: ProducerEnv) -> Custodian:
        from airflow_broadway.producers.pubsub.custodian import PubSubCustodian

        return PubSubCustodian(self, env)

    def console(self, env: ProducerEnv) -> str | None:
        from airflow_broadway.producers.pubsub.client import EMULATOR, place_of

        plain = (self.endpoint or "").startswith("http://")
        if plain or (self.endpoint is None and os.environ.get(EMULATOR)):
            return None  # an emulator has no console
        parts = place_of(self).split("/")
        if len(parts) != 4:  # the connection knows the project, once it has logged in
            return None
        detail = "cloudpubsub/subscription/detail"
        return f"https://console.cloud.google.com/{detail}/{parts[3]}?project={parts[1]}"

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        from airflow_broadway.producers.pubsub.inspect import depth

        return depth(self, env)

    def sent_back_as(self, message: Message) -> str | None:
        from airflow_broadway.producers.pubsub.dead_letters import REQUEUED

        attributes: Mapping[str, str] = message.metadata["attributes"]
        return attributes.get(REQUEUED)

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        from airflow_broadway.producers.pubsub.letters import PubSubDeadLetters

        return PubSubDeadLetters(self, env, place)
