"""RabbitMQ under broker crashes, and with queues that vanish or reject.

Generations are opened and settled by hand, with a fault between two calls.  ``make faults`` runs
all cases, the tests the fast ones; ``tests/living`` kills runs and breaks their network.
"""

from __future__ import annotations

from tests.faults.rabbitmq_cases import broker, lapsing, others, queues
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import CASES, RabbitCase

__all__ = [
    "CASES",
    "Place",
    "RabbitCase",
    "broker",
    "lapsing",
    "others",
    "queues",
]
