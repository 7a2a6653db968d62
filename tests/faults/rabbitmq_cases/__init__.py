"""RabbitMQ under kill -9, broken networks, and queues that vanish or refuse.

Without Airflow: workers that drain a queue and are killed, or generations opened and settled by
hand with a fault between two calls.  ``make faults`` runs all, the tests those that are fast.
"""

from __future__ import annotations

from tests.faults.rabbitmq_cases import broker, lapsing, network, others, queues, workers
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import CASES, RabbitCase

__all__ = [
    "CASES",
    "Place",
    "RabbitCase",
    "broker",
    "lapsing",
    "network",
    "others",
    "queues",
    "workers",
]
