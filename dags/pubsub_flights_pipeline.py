"""The demo's flights, from Google Cloud Pub/Sub: nothing but the producer is another."""

from __future__ import annotations

from airflow_broadway.producers.pubsub import PubSubProducer
from flights_pipeline import Flights

__all__ = ["PubSubFlights"]


class PubSubFlights(Flights):
    producer = PubSubProducer(  # type: ignore[assignment]  # of another kind than the base has
        subscription="flights",
        conn_id="google_cloud_default",
        concurrency=2,
        # By the retry policy, and then to the topic flights-dead.
        on_failure="retry",
        dead_letter="flights-dead",
    )
