"""The demo's flights, from Amazon SQS: nothing but the producer is another."""

from __future__ import annotations

from airflow_broadway.producers.sqs import SqsProducer
from flights_pipeline import Flights

__all__ = ["SqsFlights"]


class SqsFlights(Flights):
    producer = SqsProducer(  # type: ignore[assignment]  # of another kind than the base has
        queue_name="flights",
        conn_id="aws_default",
        concurrency=2,
        # Long polls: an empty queue costs a request in 20 seconds, and is empty for certain.
        wait_time_seconds=1,
        # By the retry policy, and then to the dead-letter queue of the queue's redrive policy.
        on_failure="retry",
    )
