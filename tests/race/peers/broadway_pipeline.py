"""A pipeline with one Python batcher of 10,000 messages, the sink ``ParquetFolder``, and one
processor with a ``max_demand`` of 1,000, because its callback does not wait; the other options are
defaults, but for SQS a lease of 60 seconds.  A run receives for 5 seconds, or until the queue has
been empty for 0.2; two runs are active at a time."""

import json
import os

from airflow_broadway import Batcher, Broadway, Processors
from airflow_broadway.producers import KafkaProducer, RabbitMQProducer, SqsProducer
from airflow_broadway.sinks import ParquetFolder

QUEUE = os.environ["RACE_QUEUE"]
PRODUCERS = {
    "rabbitmq": lambda: RabbitMQProducer(
        queue=QUEUE, conn_id="race", on_failure="retry", declare={"durable": True}
    ),
    "kafka": lambda: KafkaProducer(
        topics=[QUEUE], conn_id="race", group_id=QUEUE, offset_reset_policy="earliest"
    ),
    "sqs": lambda: SqsProducer(
        queue_name=QUEUE, conn_id="race", receive_concurrency=10, lease=60.0
    ),
}
BUDGET = {"max_seconds": 5.0, "wait_seconds": 2.0, "idle_seconds": 0.2}


class Rows(Broadway):
    producer = PRODUCERS[os.environ["RACE_BROKER"]]()
    processors = Processors(concurrency=1, max_demand=1_000)
    batchers = {
        "default": Batcher(
            engine="python",
            batch_size=10_000,
            schema="n bigint, sent double, text string",
            sink=ParquetFolder(path=os.environ["RACE_FOLDER"]),
        )
    }

    def handle_message(self, processor, message, context):
        return message.put_data(json.loads(message.data))
