"""The flights that left New York City in 2013: from a queue to Parquet, each exactly once.

A pipeline is a module of its own, apart from the DAG file: the Spark driver imports it too, without
Airflow.  It does not import pyspark, so that the DAG is parsed quickly.
"""

from __future__ import annotations

import json
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, SparkBatch
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sinks import ParquetFolder

#: The columns of a flight and their types.  A value that does not fit fails its message.
FLIGHT = {
    "origin": "string not null",
    "carrier": "string not null",
    "flight": "int not null",
    "tailnum": "string",
    "dest": "string not null",
    "time_hour": "timestamp not null",
    "hour": "int not null",
    "minute": "int not null",
    "dep_delay": "int not null",
    "arr_delay": "int",
    "air_time": "int",
    "distance": "int not null",
}
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in FLIGHT.items())

#: A flight with more minutes of delay counts as delayed.
TOLERANCE = 15


#: Each batch's rows are committed here exactly once; the DAG overrides the path.
TABLE = ParquetFolder(path="/tmp/flights", partition_by=["batcher", "origin"])


class Flights(Broadway):
    # The address of the queue is in the Airflow connection.
    producer = SqliteProducer(queue="flights", conn_id="flights_queue", concurrency=2)
    # Handling a flight takes microseconds, so chunks are large.
    processors = Processors(concurrency=1, max_demand=2_000)
    batchers = {
        "delayed": Batcher(batch_size=50_000, schema=SCHEMA, sink=TABLE),
        "on_time": Batcher(batch_size=50_000, schema=SCHEMA, sink=TABLE),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        flight = json.loads(message.data)
        if flight["dep_delay"] is None:
            # A retry would fail too: dead-letter it immediately, with the reason.
            return message.configure_ack(on_failure="dead_letter").failed("never departed")
        # A batch has the flights of one airport.
        message = message.put_batch_key(flight["origin"])
        message = message.put_batcher("delayed" if flight["dep_delay"] > TOLERANCE else "on_time")
        return message.put_data({name: flight[name] for name in FLIGHT})

    def handle_batch(
        self, batcher: str, messages: SparkBatch, batch_info: BatchInfo, context: Any
    ) -> Any:
        # Computes timestamps from the hour, the minutes past it and the delay.
        return messages.selectExpr(
            "message_id",
            f"'{batcher}' AS batcher",
            "data.origin",
            "concat(data.carrier, data.flight) AS flight",
            "data.tailnum",
            "data.dest",
            "timestampadd(MINUTE, data.minute, data.time_hour) AS scheduled_at",
            "timestampadd(MINUTE, data.minute + data.dep_delay, data.time_hour) AS departed_at",
            "data.dep_delay",
            "data.arr_delay",
            "data.air_time",
            "data.distance",
            "data.hour",
        )
        # The returned rows are committed; then every message of the batch has succeeded.
