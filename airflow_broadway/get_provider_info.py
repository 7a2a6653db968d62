"""What Airflow reads to list this package among its providers.

Airflow imports this module in every one of its processes, so it imports nothing.
"""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Return the provider's description, in the form of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-broadway",
        "name": "Broadway",
        "description": "Broadway (Elixir) for Airflow: micro-batch runs that drain message queues, "
        "process them with Spark and settle every message by the outcome of its work.",
        "operators": [
            {
                "integration-name": "Broadway",
                "python-modules": [
                    "airflow_broadway.operators.process",
                    "airflow_broadway.operators.batch",
                    "airflow_broadway.operators.spark_submit",
                    "airflow_broadway.operators.run",
                ],
            }
        ],
        "sensors": [
            {"integration-name": "Broadway", "python-modules": ["airflow_broadway.sensors.ack"]}
        ],
        "triggers": [
            {"integration-name": "Broadway", "python-modules": ["airflow_broadway.triggers.ack"]}
        ],
        "hooks": [
            {
                "integration-name": "Broadway",
                "python-modules": [
                    "airflow_broadway.hooks.sqlite",
                    "airflow_broadway.hooks.rabbitmq",
                ],
            }
        ],
        "connection-types": [
            {
                "connection-type": "broadway_sqlite",
                "hook-class-name": "airflow_broadway.hooks.sqlite.BroadwaySqliteHook",
                "hook-name": "Broadway embedded queue (SQLite)",
                "ui-field-behaviour": {
                    "hidden-fields": ["port", "schema", "login", "password", "extra"],
                    "relabeling": {"host": "Queue file"},
                    "placeholders": {"host": "/var/lib/airflow/queues.db"},
                },
            },
            {
                "connection-type": "rabbitmq",
                "hook-class-name": "airflow_broadway.hooks.rabbitmq.RabbitMQHook",
                "hook-name": "RabbitMQ",
                "ui-field-behaviour": {
                    "hidden-fields": [],
                    "relabeling": {"schema": "Virtual host"},
                    "placeholders": {
                        "host": "rabbitmq.example.org",
                        "port": "5672, or 5671 with TLS",
                        "schema": "/",
                        "extra": '{"tls": true, "heartbeat": 60}',
                    },
                },
            },
        ],
        "config": {
            "broadway": {
                "description": "What airflow-broadway's operators go by unless they are told.",
                "options": {
                    "staging": {
                        "description": "URI of the folder that holds the files of runs: messages "
                        "between tasks, outcomes, journals.  Every worker and the Spark driver "
                        "must see it.  Unset: the folder broadway of AIRFLOW_HOME, for one "
                        "machine.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "s3://aws_default@bucket/broadway",
                        "default": None,
                    }
                },
            }
        },
    }
