"""The description of this provider for Airflow.

Airflow imports this module in every one of its processes, so it imports nothing.
"""

from __future__ import annotations

from typing import Any

_CONVERTER = "airflow_broadway.adapters.assets.convert_asset_to_openlineage"


def get_provider_info() -> dict[str, Any]:
    """Returns the provider's description by Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-broadway",
        "name": "Broadway",
        "description": "Broadway (Elixir) for Airflow: micro-batch runs that drain message queues, "
        "process them with Spark and settle every message by the outcome of its work.",
        "integrations": [
            {
                "integration-name": "Broadway",
                "external-doc-url": "https://elixir-broadway.org/",
                "how-to-guide": ["/docs/operators.md", "/docs/events.md"],
                "logo": "/broadway/static/logo.svg",
                "tags": ["software"],
            },
            {
                "integration-name": "RabbitMQ",
                "external-doc-url": "https://www.rabbitmq.com/",
                "how-to-guide": ["/docs/rabbitmq.md"],
                "tags": ["software"],
            },
        ],
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
            {
                "integration-name": "Broadway",
                "python-modules": [
                    "airflow_broadway.sensors.ack",
                    "airflow_broadway.sensors.backlog",
                ],
            }
        ],
        "triggers": [
            {
                "integration-name": "Broadway",
                "python-modules": [
                    "airflow_broadway.triggers.ack",
                    "airflow_broadway.triggers.backlog",
                ],
            }
        ],
        "hooks": [
            {
                "integration-name": "Broadway",
                "python-modules": ["airflow_broadway.hooks.sqlite"],
            },
            {
                "integration-name": "RabbitMQ",
                "python-modules": ["airflow_broadway.hooks.rabbitmq"],
            },
        ],
        "queues": [
            "airflow_broadway.triggers.queues.RabbitMQQueueProvider",
            "airflow_broadway.triggers.queues.EmbeddedQueueProvider",
        ],
        "asset-uris": [
            {
                "schemes": ["broadway+rabbitmq", "broadway+sqlite"],
                "handler": "airflow_broadway.adapters.assets.sanitize_uri",
                "factory": "airflow_broadway.adapters.assets.create_asset",
                "to_openlineage_converter": _CONVERTER,
            },
            {
                "schemes": ["iceberg", "x-postgres"],
                "handler": "airflow_broadway.adapters.assets.sanitize_uri",
                "to_openlineage_converter": _CONVERTER,
            },
        ],
        "cli": ["airflow_broadway.cli.provider.get_broadway_cli_commands"],
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
                        "host": "rabbit.example.org, or several: a.example.org, b.example.org:5673",
                        "port": "5672, or 5671 with TLS",
                        "schema": "/",
                    },
                },
                "conn-fields": {
                    "tls": {
                        "label": "TLS",
                        "description": "Whether the connection is by TLS.",
                        "schema": {"type": ["boolean", "null"]},
                    },
                    "tls_ca": {
                        "label": "TLS: authority",
                        "description": "File with the certificates that are trusted; the "
                        "system's unless given.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "tls_cert": {
                        "label": "TLS: own certificate",
                        "description": "File with the certificate that is shown to the broker.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "tls_key": {
                        "label": "TLS: own key",
                        "description": "File with the key of the own certificate.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "tls_server_name": {
                        "label": "TLS: name of the server",
                        "description": "The name in the broker's certificate; the host unless "
                        "given.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "auth_mechanism": {
                        "label": "Login",
                        "description": "By user and password (plain), or by the own certificate "
                        "(external).",
                        "schema": {
                            "type": ["string", "null"],
                            "enum": ["plain", "external", None],
                        },
                    },
                    "management_url": {
                        "label": "Management API",
                        "description": "Where it is, https://host:port, or false; its usual port "
                        "of the first host with TLS or on this machine, unless given.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "heartbeat": {
                        "label": "Heartbeat",
                        "description": "Seconds after which a silent peer counts as dead; 60.",
                        "schema": {"type": ["integer", "null"], "minimum": 0, "maximum": 65535},
                    },
                    "timeout": {
                        "label": "Timeout",
                        "description": "Seconds that connecting to a host may take; 30.",
                        "schema": {"type": ["number", "null"]},
                    },
                    "blocked_connection_timeout": {
                        "label": "Timeout when blocked",
                        "description": "Seconds for which a broker that is short of memory or "
                        "disk may keep a connection waiting; 300.",
                        "schema": {"type": ["number", "null"]},
                    },
                },
            },
        ],
        "extra-links": [
            "airflow_broadway.adapters.links.RunPageLink",
            "airflow_broadway.adapters.links.ReportLink",
            "airflow_broadway.adapters.links.ConsoleLink",
            "airflow_broadway.adapters.links.SparkLink",
        ],
        "config": {
            "broadway": {
                "description": "Defaults of airflow-broadway's operators.",
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
                    },
                    "deployment": {
                        "description": "A name of this Airflow, the same on all its workers and "
                        "no other's.  Generations of another Airflow are left alone until their "
                        "lease has lapsed.  Unset: the address of the API server that tasks "
                        "report to; where that is a loopback address, host and AIRFLOW_HOME.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "production",
                        "default": None,
                    },
                    "spark_history": {
                        "description": "Address of Spark's history server, to which the link "
                        "Spark of a task leads once its application has ended.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "http://spark-history.example.org:18080",
                        "default": None,
                    },
                    "ask_brokers": {
                        "description": "Whether the API server itself queries brokers for "
                        "backlogs and dead letters, with its connections and the options that the "
                        "last run reported.  No code of a pipeline runs there, either way.  Off: "
                        "the pages show what runs, triggers and sensors report.",
                        "version_added": "0.1.0",
                        "type": "boolean",
                        "example": None,
                        "default": "False",
                    },
                },
            }
        },
    }
