"""Flights from RabbitMQ, batched by airport; each batch is one object in the bucket."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors
from airflow_broadway.producers.rabbitmq import RabbitMQProducer


class ClusterFlights(Broadway):
    # The lease is shorter than one host's clock may be ahead.
    producer = RabbitMQProducer(
        queue="flights", conn_id="cluster_rabbitmq", concurrency=2, lease=240.0
    )
    # At most 500 messages a second and task: a run lasts long enough to be disturbed.
    processors = Processors(max_demand=100)
    batchers = {"default": Batcher(engine="python", batch_size=5_000)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        flight = json.loads(message.data)
        time.sleep(0.002)
        if flight["dep_delay"] is None:
            return message.configure_ack(on_failure="dead_letter").failed("never departed")
        return message.put_batch_key(flight["origin"]).put_data(flight)

    def handle_batch(
        self, batcher: str, messages: Sequence[Message], batch_info: BatchInfo, context: Any
    ) -> Sequence[Message]:
        from airflow.providers.amazon.aws.hooks.s3 import S3Hook

        rows = [{**message.data, "redelivered": message.redelivered} for message in messages]
        lines = "\n".join(map(json.dumps, rows))
        key = f"output/{batch_info.batch_key}/{batch_info.batch_id}"
        S3Hook("cluster_s3").load_string(lines, key, "cluster", replace=True)
        return messages
