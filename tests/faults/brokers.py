"""The brokers of the fault runs.

To add a broker, write a module next to this one, a pipeline in ``dags/killed_pipeline.py``, and an
entry in :data:`BROKERS`.
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

#: By name: creates the broker's queue, with its files in a folder.
BROKERS: Mapping[str, Callable[[Path], Broker]] = {
    "sqlite": Sqlite,
    "rabbitmq": RabbitMQ,
    "sqs": Sqs,
    "kafka": Kafka,
    "pubsub": PubSub,
}
