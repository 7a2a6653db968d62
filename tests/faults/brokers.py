"""The brokers of the fault runs.

Another broker takes part by an entry in :data:`BROKERS`, with a module of its own beside this one,
and a pipeline in ``dags/killed_pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.broker import Broker
from tests.faults.brokers_kafka import Kafka
from tests.faults.brokers_pubsub import PubSub
from tests.faults.brokers_rabbitmq import RabbitMQ
from tests.faults.brokers_sqlite import Sqlite
from tests.faults.brokers_sqs import Sqs

#: By name: makes the broker's queue, with its files in a folder.
BROKERS: Mapping[str, Callable[[Path], Broker]] = {
    "sqlite": Sqlite,
    "rabbitmq": RabbitMQ,
    "sqs": Sqs,
    "kafka": Kafka,
    "pubsub": PubSub,
}
