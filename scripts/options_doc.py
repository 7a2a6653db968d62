"""Render docs/options.md from the declarations: ``python -m scripts.options_doc``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from airflow_broadway.core.options import Batcher, Processors, RateLimiting, RetryPolicy
from airflow_broadway.core.producer import Producer
from airflow_broadway.core.rules import AUTO
from airflow_broadway.producers.rabbitmq import Qos, RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"

HEAD = """# Options

Made from the declarations by `python -m scripts.options_doc`; a test compares.  Durations are
seconds, sizes bytes.  An unknown or ill-typed option is an `OptionsError` that names its path, the
value, the rule or the valid names, and the nearest of them.

Any option may be overridden where the pipeline is used, with JSON values and Airflow templates:

```python
Flights(
    producer={"queue": "flights-{{ var.value.env }}"},
    batchers={"delayed": {"batch_size": 10}},
)
```
"""

SECTIONS: list[tuple[str, str, type[Any], type[Any] | None]] = [
    ("Every producer", "`producer = …Producer(…)`", Producer, None),
    ("Embedded queue", "`producer = SqliteProducer(…)`", SqliteProducer, Producer),
    ("RabbitMQ", "`producer = RabbitMQProducer(…)`", RabbitMQProducer, Producer),
    ("RabbitMQ: prefetching", "`producer = RabbitMQProducer(qos=Qos(…))`", Qos, None),
    ("Amazon SQS", "`producer = SqsProducer(…)`", SqsProducer, Producer),
    ("Retries", "`producer = …Producer(retry=RetryPolicy(…))`", RetryPolicy, None),
    ("Rate limiting", "`producer = …Producer(rate_limiting=RateLimiting(…))`", RateLimiting, None),
    ("Processors", "`processors = Processors(…)`", Processors, None),
    ("Batchers", '`batchers = {"name": Batcher(…)}`', Batcher, None),
]

#: What stands for ``AUTO``.
AUTO_TEXT = "see text"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(*section) for section in SECTIONS)


def _section(title: str, use: str, cls: type[Any], base: type[Any] | None) -> str:
    known = {field.name for field in dataclasses.fields(base)} if base is not None else set()
    rows = "".join(
        f"| `{field.name}` | {field.metadata['rule'].text} | {_default(field)} | "
        f"{_code(field.metadata['doc'])} |\n"
        for field in dataclasses.fields(cls)
        if field.name not in known
    )
    return f"\n## {title}\n\n{use}\n\n| option | value | default | |\n|---|---|---|---|\n{rows}"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return AUTO_TEXT if field.default is AUTO else f"`{field.default!r}`".replace("|", "\\|")


def _code(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
