"""Where messages come from: one file or folder per broker, each loaded when it is first named."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_broadway.producers.kafka import KafkaProducer
    from airflow_broadway.producers.pubsub import PubSubProducer
    from airflow_broadway.producers.rabbitmq import RabbitMQProducer
    from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
    from airflow_broadway.producers.sqs import SqsProducer

__all__ = [
    "KafkaProducer",
    "PubSubProducer",
    "RabbitMQProducer",
    "SqliteProducer",
    "SqliteQueue",
    "SqsProducer",
]

_HOMES = {
    "KafkaProducer": "airflow_broadway.producers.kafka",
    "PubSubProducer": "airflow_broadway.producers.pubsub",
    "RabbitMQProducer": "airflow_broadway.producers.rabbitmq",
    "SqliteProducer": "airflow_broadway.producers.sqlite",
    "SqliteQueue": "airflow_broadway.producers.sqlite",
    "SqsProducer": "airflow_broadway.producers.sqs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
