"""The pipelines of the benchmarks, except the demo's, and their settings of Spark."""

from __future__ import annotations

import json
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, SparkBatch
from airflow_broadway.producers import (
    KafkaProducer,
    PubSubProducer,
    RabbitMQProducer,
    SqliteProducer,
    SqsProducer,
)

#: Spark settings for a small JVM that starts fast.
SPARK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


class KeyedPipeline(Broadway):
    """Batches messages by key; ``handle_batch`` is trivial."""

    producer = SqliteProducer(queue="bench", path="/nowhere/bench.db")
    processors = Processors(concurrency=1, max_demand=2_000)
    batchers = {"default": Batcher(schema="n int, key int")}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        data = json.loads(message.data)
        return message.put_data(data).put_batch_key(data["key"])

    def handle_batch(
        self, batcher: str, messages: SparkBatch, batch_info: BatchInfo, context: Any
    ) -> None:
        return None


class TwoBatchers(Broadway):
    """Trivial callbacks; messages alternate between two batchers."""

    processors = Processors(concurrency=1, max_demand=1000)
    batchers = {"even": Batcher(), "odd": Batcher()}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_batcher("odd" if message.position % 2 else "even")

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return None


class RabbitMQPipeline(TwoBatchers):
    producer = RabbitMQProducer(queue="bench", uri="amqp://localhost")


class SqsPipeline(TwoBatchers):
    producer = SqsProducer(queue_name="bench")


class KafkaPipeline(TwoBatchers):
    producer = KafkaProducer(group_id="bench", topics=["bench"], offset_reset_policy="earliest")


class PubSubPipeline(TwoBatchers):
    producer = PubSubProducer(subscription="bench")
