"""Renders docs/options.md from the options' declarations: ``python -m scripts.options_doc``."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from airflow_broadway import Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.core.model.pipeline_options import (
    Archive,
    Batcher,
    Processors,
    RateLimiting,
    RetryPolicy,
)
from airflow_broadway.core.model.rules import AUTO
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.rabbitmq import Qos, RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.sinks import DeltaTable, IcebergTable, ParquetFolder, PostgresTable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"

HEAD = """# Options

Generated from the declarations by `python -m scripts.options_doc`; a test compares.  Durations are
seconds, sizes bytes; numbers are greater than 0 unless a range is given.  An unknown or ill-typed
option is an `OptionsError` that names its path, the value, the rule or the valid names, and the
nearest of them.

Any option may be overridden where the pipeline is used, with JSON values and Airflow templates:

```python
Flights(
    producer={"queue": "flights-{{ var.value.env }}"},
    batchers={"delayed": {"batch_size": 10}},
)
```

Nested options (`producer`, `processors`, `batchers`, and `retry`, `rate_limiting`, `qos` in them)
are merged: options that are not named stay as declared.  `context` is replaced whole.

## The pipeline

Attributes of the class, and overrides of the same names:

| option | value | default | |
|---|---|---|---|
"""

#: Option, value, default, description.
PIPELINE: list[tuple[str, str, str, str]] = [
    (
        *("name", "at most 100 letters, digits, `_`, `-` and `.`", "the class's name"),
        "In staging paths, metrics and logs.",
    ),
    ("producer", "producer", "required", "The source of messages."),
    (
        *("processors", '`Processors(…)`, or `{"name": Processors(…)}` with one entry'),
        *("`Processors()`", "How `handle_message` is run."),
    ),
    (
        *("batchers", "names to `Batcher(…)`", "`{}`"),
        "How `handle_batch` is run.  Without any, messages are settled after `handle_message`.",
    ),
    (
        *("archive", "`Archive(…)`", "`None`"),
        "Keeps received messages, so that [a past interval can be run again](backfills.md).",
    ),
    (
        *("dead_letter_table", "sink", "`None`"),
        "Gets [a row for each dead-lettered message](dead-letters.md#a-table-of-dead-letters).",
    ),
    (
        *("partition_by", "function", "`None`"),
        "The default of processors and batchers.  Declared in the class, not overridden.",
    ),
    (
        *("context", "JSON", f"`{Broadway.context!r}`"),
        "The `context` of every callback, unless `setup` returns another.",
    ),
    (
        *("shutdown", "seconds", f"`{Broadway.shutdown!r}`"),
        "Seconds in which a run that is stopped may finish its current work; the rest is released.",
    ),
]

#: The text after the table of the pipeline.
CALLS = """
A pipeline may define `setup(self, run)`: called once per process, before any other callback, on
workers and on the Spark driver; its result is the `context`.  `self.run` is a `RunInfo` in every
callback, with {run}.  Outside Airflow its ids are `"local"`.
"""

#: The producers with their required options, to render their defaults.
PRODUCERS: list[tuple[str, type[Any], dict[str, Any]]] = [
    ("Embedded queue", SqliteProducer, {"queue": "orders"}),
    ("RabbitMQ", RabbitMQProducer, {"queue": "orders"}),
    ("Amazon SQS", SqsProducer, {"queue_name": "orders"}),
    ("Apache Kafka", KafkaProducer, {"group_id": "orders", "topics": ["orders"]}),
    ("Google Cloud Pub/Sub", PubSubProducer, {"subscription": "orders"}),
]

OTHERS: list[tuple[str, str, type[Any]]] = [
    ("RabbitMQ: prefetching", "`producer = RabbitMQProducer(qos=Qos(…))`", Qos),
    ("Retries", "`producer = …Producer(retry=RetryPolicy(…))`", RetryPolicy),
    ("Rate limiting", "`producer = …Producer(rate_limiting=RateLimiting(…))`", RateLimiting),
    ("Processors", "`processors = Processors(…)`", Processors),
    ("Archive", "`archive = Archive(…)`", Archive),
    ("Batchers", '`batchers = {"name": Batcher(…)}`', Batcher),
    ("Sinks: a folder", "`Batcher(sink=ParquetFolder(…))`", ParquetFolder),
    ("Sinks: Delta Lake", "`Batcher(sink=DeltaTable(…))`", DeltaTable),
    ("Sinks: Apache Iceberg", '`Batcher(engine="python", sink=IcebergTable(…))`', IcebergTable),
    ("Sinks: PostgreSQL", "`Batcher(sink=PostgresTable(…))`", PostgresTable),
    ("Runs by a backlog", "`Flights.dag(…, schedule=backlog(…))`", Backlog),
]

#: Short forms of rules for the page; errors have the full rules.
RULES = {
    "a number of seconds greater than 0": "seconds",
    "a number of seconds of at least 0": "seconds or 0",
    "a number from 0 to 1": "0 to 1",
    "a positive integer": "integer",
    "an integer of at least 0": "integer or 0",
    "True or False": "boolean",
    "a non-empty string": "text",
    "a function of one argument": "function",
    "the id of an Airflow connection, not an address": "connection id",
    "an action of this producer": "action",
    "amqp://host:port/virtual-host without a password": "`amqp://host:port/virtual-host`",
    "a positive integer, or a pair of a start value and a function of two arguments": (
        "integer, or a pair"
    ),
    "'earliest', 'latest' or a timestamp with its time zone, such as '2026-01-31T12:00:00+00:00'": (
        "`'earliest'`, `'latest'`, or a timestamp such as `'2026-01-31T12:00:00+00:00'`"
    ),
    (
        "'header:NAME', a JSON pointer into the payload such as '/order/id', or RabbitMQ's"
        " 'message_id'"
    ): "text",
    "'host:port,host:port', or a list of 'host:port'": "`'host:port,host:port'`, or a list",
    "the URL of a queue, https://… (or http://… of a test server)": "URL",
    "'all' or a list of non-empty names, such as 'kind' or 'trace.*'": "`'all'` or a list",
    (
        "a host and a port, such as 'europe-west1-pubsub.googleapis.com:443', or of an emulator"
        " 'http://127.0.0.1:8085'"
    ): "host and port",
    "seconds from 10 to 600, what Pub/Sub allows": "10 to 600 seconds",
    "a sink, such as ParquetFolder(…)": "sink",
}

#: The texts for ``AUTO``, and for defaults that differ by producer.
AUTO_TEXT = "see text"
BY_PRODUCER = ", unless its table differs"
#: Options that share a row in the table of a producer.
ACTIONS = ("on_success", "on_failure")
_TABLE = "| option | value | default | |\n|---|---|---|---|\n"


def page() -> str:
    """Renders the page."""
    run = ", ".join(f"`{field.name}`" for field in dataclasses.fields(RunInfo))
    rows = [
        f"| `{name}` | {value} | {default} | {doc} |\n" for name, value, default, doc in PIPELINE
    ]
    return "".join(
        [
            HEAD,
            *rows,
            CALLS.format(run=run),
            _every_producer(),
            *(_producer(*producer) for producer in PRODUCERS),
            *(_section(*other) for other in OTHERS),
        ]
    )


def _every_producer() -> str:
    producers = [cls(**least) for _, cls, least in PRODUCERS]
    rows = ""
    for field in dataclasses.fields(Producer):
        same = all(getattr(options, field.name) == field.default for options in producers)
        default = _default(field) + ("" if same else BY_PRODUCER)
        rows += _row(field, default)
    return _titled("Every producer", "`producer = …Producer(…)`", rows)


def _producer(title: str, cls: type[Any], least: dict[str, Any]) -> str:
    """Renders a producer's options, including common options with other values or defaults."""
    producer = cls(**least)
    shared = {field.name: field for field in dataclasses.fields(Producer)}
    rows = own = ""
    for field in dataclasses.fields(cls):
        default = _default(field)
        if default == AUTO_TEXT:
            default = _shown(getattr(producer, field.name))
        if field.name in shared and field.name not in ACTIONS:
            same = getattr(producer, field.name) == shared[field.name].default
            own += "" if same else _row(field, default)
        elif field.name not in ACTIONS:
            rows += _row(field, default)
    names = ", ".join(f"`{name}`" for name in ACTIONS)
    defaults = ", ".join(_shown(getattr(producer, name)) for name in ACTIONS)
    rows += f"| {names} | {', '.join(f'`{name}`' for name in cls.actions)} | {defaults} | |\n"
    return _titled(title, f"`producer = {cls.__name__}(…)`", rows + own)


def _section(title: str, use: str, cls: type[Any]) -> str:
    rows = "".join(_row(field, _default(field)) for field in dataclasses.fields(cls))
    return _titled(title, use, rows)


def _titled(title: str, use: str, rows: str) -> str:
    return f"\n## {title}\n\n{use}\n\n{_TABLE}{rows}"


def _row(field: dataclasses.Field[Any], default: str) -> str:
    value, doc = _value(field.metadata["rule"].text, default), _code(field.metadata["doc"])
    return f"| `{field.name}` | {value} | {default} | {doc} |\n"


def _value(rule: str, default: str) -> str:
    """Shortens a rule; mentions ``None`` unless it is the default."""
    optional = rule.endswith(" or None")
    text = rule.removesuffix(" or None")
    text = text if text in RULES else re.split(": (?!…)|; ", text)[0]
    text = RULES.get(text, text)
    text = re.sub(r"^(one of|an integer from|whole|the|an?) ", "", text)
    text = re.sub(r"\['.*?'\]", lambda found: found[0].strip("[]").replace("'", "`"), text)
    return text + (" or `None`" if optional and default != "`None`" else "")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return AUTO_TEXT if field.default is AUTO else _shown(field.default)


def _shown(value: Any) -> str:
    return f"`{value!r}`".replace("|", "\\|")


def _code(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
