"""The demo's flights from Apache Kafka: only the producer differs."""

from __future__ import annotations

from airflow_broadway.producers.kafka import KafkaProducer
from flights_pipeline import Flights

__all__ = ["KafkaFlights"]


class KafkaFlights(Flights):
    producer = KafkaProducer(  # type: ignore[assignment]  # another type than the base class has
        group_id="flights",
        topics=["flights"],
        conn_id="kafka_default",
        # Messages sent before the first run are received, too.
        offset_reset_policy="earliest",
        # Flights are independent: a retry does not block others.
        order="none",
        concurrency=2,
        # By the topic flights.retry; out of attempts, to the topic flights-dlt.
        on_failure="retry",
    )
