"""The demo's flights, from RabbitMQ: nothing but the producer is another."""

from __future__ import annotations

from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from flights_pipeline import Flights

__all__ = ["RabbitMQFlights"]


class RabbitMQFlights(Flights):
    producer = RabbitMQProducer(  # type: ignore[assignment]  # of another kind than the base has
        queue="flights",
        conn_id="rabbitmq_default",
        concurrency=2,
        declare={"durable": True, "arguments": {"x-queue-type": "quorum"}},
        # By the retry policy, and then to broadway.dead.flights.
        on_failure="retry",
    )
