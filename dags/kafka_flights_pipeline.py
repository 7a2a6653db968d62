"""The demo's flights, from Apache Kafka: nothing but the producer is another."""

from __future__ import annotations

from airflow_broadway.producers.kafka import KafkaProducer
from flights_pipeline import Flights

__all__ = ["KafkaFlights"]


class KafkaFlights(Flights):
    producer = KafkaProducer(  # type: ignore[assignment]  # of another kind than the base has
        group_id="flights",
        topics=["flights"],
        conn_id="kafka_default",
        # What was sent before the first run counts, too.
        offset_reset_policy="earliest",
        # No flight depends on another: one that is retried holds up nothing.
        order="none",
        concurrency=2,
        # In the topic flights.retry, by the retry policy; and then to the topic flights-dlt.
        on_failure="retry",
    )
