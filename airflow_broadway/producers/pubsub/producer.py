"""Pub/Sub as a pipeline's producer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.engine.port import Broker
from airflow_broadway.producers.pubsub.options import PubSubOptions


@options
class PubSubProducer(PubSubOptions):
    """Messages from a pull subscription of Google Cloud Pub/Sub: see ``docs/pubsub.md``.

    ``on_success`` and ``on_failure`` take Broadway's values: ``"ack"``; ``"noop"``, after which the
    message comes again once its lease is over; ``"nack"`` and ``("nack", seconds)``, after which it
    comes again at once or then, as often as Pub/Sub's own dead-letter policy allows.  Beside them
    ``"retry"`` (by the option ``retry``), ``"dead_letter"`` and ``"release"``, at once and without
    using up an attempt.
    """

    def broker(self, env: ProducerEnv) -> Broker[Any]:
        from airflow_broadway.producers.pubsub.adapter import PubSubBroker

        return PubSubBroker(self, env)

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

    def sent_back_as(self, message: Message) -> str | None:
        from airflow_broadway.producers.pubsub.dead_letters import REQUEUED

        attributes: Mapping[str, str] = message.metadata["attributes"]
        return attributes.get(REQUEUED)
