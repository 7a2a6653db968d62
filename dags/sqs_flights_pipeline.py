"""The demo's flights from Amazon SQS: only the producer differs."""

from __future__ import annotations

from airflow_broadway.producers.sqs import SqsProducer
from flights_pipeline import Flights

__all__ = ["SqsFlights"]


class SqsFlights(Flights):
    producer = SqsProducer(  # type: ignore[assignment]  # another type than the base class has
        queue_name="flights",
        conn_id="aws_default",
        concurrency=2,
        # A long poll queries all of SQS's servers: an empty response means an empty queue.
        wait_time_seconds=1,
        # Out of attempts, to the dead-letter queue of the redrive policy.
        on_failure="retry",
    )
