"""The demo's flights from Google Cloud Pub/Sub: only the producer differs."""

from __future__ import annotations

from airflow_broadway.producers.pubsub import PubSubProducer
from flights_pipeline import Flights

__all__ = ["PubSubFlights"]


class PubSubFlights(Flights):
    producer = PubSubProducer(  # type: ignore[assignment]  # another type than the base class has
        subscription="flights",
        conn_id="google_cloud_default",
        concurrency=2,
        # Out of attempts, to the topic flights-dead.
        on_failure="retry",
        dead_letter="flights-dead",
    )
