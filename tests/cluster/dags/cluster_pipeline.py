"""Pipelines of flights, batched by airport; a batch is an object in the bucket, or a commit."""

from __future__ import annotations

import json
import time
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, SparkBatch
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.sinks import PostgresTable

#: Lease in seconds; shorter than the clock skew of one host.
LEASE = 240.0


class ClusterFlights(Broadway):
    producer: Any = RabbitMQProducer(
        queue="flights", conn_id="cluster_rabbitmq", concurrency=2, lease=LEASE
    )
    # At most 500 messages per second and task, so that a run lasts until the fault.
    processors = Processors(max_demand=100)
    batchers = {"default": Batcher(engine="python", batch_size=5_000)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        flight = json.loads(message.data)
        time.sleep(0.002)
        if flight["dep_delay"] is None:
            return message.configure_ack(on_failure="dead_letter").failed("never departed")
        return message.put_batch_key(flight["origin"]).put_data({"number": flight["number"]})

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        from airflow.providers.amazon.aws.hooks.s3 import S3Hook

        rows = [{**message.data, "redelivered": message.redelivered} for message in messages]
        lines = "\n".join(map(json.dumps, rows))
        key = f"output/{batch_info.batch_key}/{batch_info.batch_id}"
        S3Hook("cluster_s3").load_string(lines, key, "cluster", replace=True)
        return messages


class SqsFlights(ClusterFlights):
    producer = SqsProducer(queue_name="flights", conn_id="cluster_sqs", concurrency=2, lease=LEASE)


class KafkaFlights(ClusterFlights):
    producer = KafkaProducer(
        group_id="flights",
        topics=["flights"],
        conn_id="cluster_kafka",
        offset_reset_policy="earliest",
        order="none",
        concurrency=2,
        lease=LEASE,
    )


class SparkFlights(ClusterFlights):
    producer = RabbitMQProducer(
        queue="spark_flights",
        conn_id="cluster_rabbitmq",
        concurrency=2,
        lease=LEASE,
        # The flights are published without message_id.
        message_identity="/number",
    )
    batchers = {
        "default": Batcher(
            batch_size=5_000,
            schema="number int not null",
            sink=PostgresTable(table="public.flights", conn_id="cluster_postgres"),
        )
    }

    def handle_batch(
        self, batcher: str, messages: SparkBatch, batch_info: BatchInfo, context: Any
    ) -> Any:
        from pyspark.sql import functions

        @functions.udf("int")
        def slowly(number: int) -> int:
            """Slows an executor down, so that the fault hits it."""
            time.sleep(0.003)
            return number

        return messages.select(slowly("data.number").alias("number"), "redelivered")
