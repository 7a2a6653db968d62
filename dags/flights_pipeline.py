"""The flights that left New York City in 2013: from a queue to Parquet, with hourly statistics.

A pipeline is a module of its own, apart from the DAG file: the Spark driver imports it too, and
there is no Airflow there.  It imports no pyspark either, so that Airflow parses the DAG in no time.
"""

from __future__ import annotations

import json
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, SparkBatch
from airflow_broadway.producers.sqlite import SqliteProducer

#: What Spark gets of a flight, by column.  A value that does not fit fails its own message.
FLIGHT = {
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

#: Later than this, in minutes, and a flight counts as delayed.
TOLERANCE = 15


class Flights(Broadway):
    # An Airflow connection has the queue's address: on a laptop another than in production.
    producer = SqliteProducer(queue="flights", conn_id="flights_queue", concurrency=2)
    # Handling a flight takes microseconds, so hand them out by the thousand.
    processors = Processors(concurrency=1, max_demand=2_000)
    batchers = {
        "delayed": Batcher(batch_size=50_000, schema=SCHEMA),
        "on_time": Batcher(batch_size=50_000, schema=SCHEMA),
    }
    # The output's folder, which the DAG passes.
    context = {"output": "build/flights"}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        flight = json.loads(message.data)
        if flight["dep_delay"] is None:
            # Trying again would not make it depart: straight to the dead letters, with the reason.
            return message.configure_ack(on_failure="dead_letter").failed("never departed")
        # One batch, one airport: what handle_batch writes can then lie in that airport's folder.
        message = message.put_batch_key(flight["origin"])
        message = message.put_batcher("delayed" if flight["dep_delay"] > TOLERANCE else "on_time")
        return message.put_data({name: flight[name] for name in FLIGHT})

    def handle_batch(
        self, batcher: str, messages: SparkBatch, batch_info: BatchInfo, context: Any
    ) -> None:
        # A time comes as an hour, minutes past it and a delay: make timestamps of them.
        flights = messages.selectExpr(
            "message_id",
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
        # Counts and sums rather than means: those of several batches add up.
        hours = messages.sparkSession.sql(
            "SELECT hour, count(*) AS flights, sum(dep_delay) AS minutes FROM {it} GROUP BY hour",
            it=flights,
        )
        # Folders of this batch's own, overwritten: running the batch again changes nothing.
        parts = (f"batcher={batcher}", f"origin={batch_info.batch_key}")
        for name, rows in {"flights": flights, "hours": hours}.items():
            rows.write.mode("overwrite").parquet(batch_info.path(context["output"], name, *parts))
        # Nothing returned: every message of the batch succeeded.
