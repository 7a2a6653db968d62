"""RabbitMQ's custody under broker crashes, deleted queues and rejected publishes.

The cases call receive and settle directly, with a fault between two calls.  ``make faults`` runs
all cases, the tests run the fast ones.  ``tests/traffic`` kills runs and breaks their network.
"""

from __future__ import annotations

from tests.faults.rabbitmq_cases import (
    broker_restarts,
    interrupted_settlement,
    lease_expiry,
    queues,
)
from tests.faults.rabbitmq_cases.harness import QueueHarness
from tests.faults.rabbitmq_cases.registry import CASES, RabbitCase

__all__ = [
    "CASES",
    "QueueHarness",
    "RabbitCase",
    "broker_restarts",
    "interrupted_settlement",
    "lease_expiry",
    "queues",
]
