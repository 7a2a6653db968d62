"""The pipeline of the SQS figures: trivial callbacks, two batchers."""

from __future__ import annotations

from typing import Any

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.producers.sqs import SqsProducer


class Bench(Broadway):
    """Every other message goes to each batcher."""

    producer = SqsProducer(queue_name="bench")
    processors = Processors(concurrency=1, max_demand=1000)
    batchers = {"even": Batcher(), "odd": Batcher()}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_batcher("odd" if message.position % 2 else "even")

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return None
