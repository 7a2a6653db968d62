"""The list of public names; users' imports do not break."""

from __future__ import annotations

import importlib

import pytest

#: Module → the names that pipelines, Dags and their tests import from it.
PUBLIC = {
    "airflow_broadway": [
        "Archive",
        "BatchInfo",
        "BatchMode",
        "Batcher",
        "Broadway",
        "Interval",
        "Message",
        "Processors",
        "PythonBatch",
        "RateLimiting",
        "RetryPolicy",
        "Rows",
        "RunInfo",
        "RunSource",
        "SparkBatch",
        "Trigger",
        "ack_immediately",
        "backlog",
        "failed",
    ],
    "airflow_broadway.core.errors": [
        "BroadwayError",
        "ConnectionMissing",
        "ConversionError",
        "LeaseLapsed",
        "OptionsError",
        "PipelineError",
        "ProducerError",
        "ProducerUnavailable",
        "SchemaError",
        "StagingDamaged",
        "StagingError",
    ],
    "airflow_broadway.core.telemetry": ["EVENTS", "attach", "detach", "log_handler"],
    "airflow_broadway.hooks.rabbitmq": ["RabbitMQHook"],
    "airflow_broadway.hooks.sqlite": ["BroadwaySqliteHook"],
    "airflow_broadway.operators.batch": ["BroadwayBatcherOperator"],
    "airflow_broadway.operators.process": ["BroadwayProcessorOperator"],
    "airflow_broadway.operators.run": ["BroadwayRunOperator"],
    "airflow_broadway.operators.spark_submit": ["BroadwaySparkSubmitOperator"],
    "airflow_broadway.producers": [
        "KafkaProducer",
        "PubSubProducer",
        "RabbitMQProducer",
        "SqliteProducer",
        "SqliteQueue",
        "SqsProducer",
    ],
    "airflow_broadway.producers.kafka": ["KafkaProducer"],
    "airflow_broadway.producers.pubsub": ["PubSubProducer"],
    "airflow_broadway.producers.rabbitmq": ["Qos", "RabbitMQProducer"],
    "airflow_broadway.producers.sqlite": [
        "DeadLetter",
        "LeaseRecord",
        "SqliteProducer",
        "SqliteQueue",
    ],
    "airflow_broadway.producers.sqs": ["SqsProducer"],
    "airflow_broadway.sensors.ack": ["BroadwayAckSensor"],
    "airflow_broadway.sensors.backlog": ["BroadwayBacklogSensor"],
    "airflow_broadway.testing": [
        "AckCall",
        "DummyProducer",
        "ManualClock",
        "PipelineDriver",
        "RecordingAcknowledger",
        "Tested",
        "test_batch",
        "test_message",
    ],
    "airflow_broadway.testing.contract": [
        "CustodyContract",
        "DeadLettersContract",
        "Harness",
        "entry_of",
        "ids",
        "settlement_of",
    ],
    "airflow_broadway.triggers.ack": ["BroadwayAckTrigger"],
    "airflow_broadway.triggers.backlog": [
        "BroadwayBacklogReachedTrigger",
        "BroadwayBacklogTrigger",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_stay_where_they_are(module):
    names = PUBLIC[module]
    loaded = importlib.import_module(module)
    assert [name for name in names if not hasattr(loaded, name)] == []
    # `__all__` lacks none of them.
    assert set(names) <= set(getattr(loaded, "__all__", names))


@pytest.mark.parametrize("module", ["airflow_broadway", "airflow_broadway.producers"])
def test_exports_of_the_top_modules_are_public(module):
    assert sorted(importlib.import_module(module).__all__) == PUBLIC[module]
