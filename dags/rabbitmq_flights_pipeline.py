"""The demo's flights from RabbitMQ: only the producer differs."""

from __future__ import annotations

from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from flights_pipeline import Flights

__all__ = ["RabbitMQFlights"]


class RabbitMQFlights(Flights):
    producer = RabbitMQProducer(  # type: ignore[assignment]  # another type than the base class has
        queue="flights",
        conn_id="rabbitmq_default",
        concurrency=2,
        declare={"durable": True, "arguments": {"x-queue-type": "quorum"}},
        # Out of attempts, to the queue broadway.dead.flights.
        on_failure="retry",
    )
