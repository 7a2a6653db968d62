"""The table of batch contents in docs/semantics.md matches the code."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from airflow_broadway import Batcher, Broadway, Message
from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.stages.staged_row import RowConverter
from airflow_broadway.testing import DummyProducer, test_message

PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"


class Point(NamedTuple):
    x: int
    y: int


KNOWN = {kind.__name__: kind for kind in (Decimal, date, datetime, Point, UUID)} | {
    "nan": float("nan"),
    "UTC": UTC,
}
#: What a callback puts there: data without a schema, data with ``x int, t string``.
PLAIN = [
    "b'raw'",
    "None",
    "{'a': [1, 2.5, None, True]}",
    "(1, 2)",
    "Point(1, 2)",
    "{1, 2}",
    "{1: 'int keys'}",
    "nan",
    "[b'raw']",
    "Decimal('1.50')",
    "date(2026, 1, 1)",
    "datetime(2026, 1, 1, tzinfo=UTC)",
    "UUID(int=1)",
    "object()",
]
BY_SCHEMA = [
    "{'x': 1, 't': 'a'}",
    "{'x': 1, 'other': 2}",
    "Point(1, 2)",
    "{'x': '1'}",
    "{'x': 1.0}",
    "b'raw'",
    "None",
]


def pipeline(**options: Any) -> Broadway:
    class Case(Broadway):
        producer = DummyProducer()
        batchers = {"default": Batcher(**options)}

        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message

        def handle_batch(self, batcher: str, messages: Any, info: Any, context: Any) -> Any:
            return messages

    return Case()


def shown(value: Any) -> str:
    text = repr(value).replace("datetime.timezone.utc", "UTC").replace("datetime.", "")
    return f"`{text}`"


def in_python(value: Any, schema: str | None) -> str:
    tested = test_message(pipeline(engine="python", schema=schema), value)
    return shown(tested.successful[0].data) if tested.successful else "fails"


def in_spark(value: Any, schema: str | None) -> str:
    try:
        data = RowConverter(pipeline(schema=schema))(Message(value)).data.data
    except ConversionError:
        return "fails"
    if schema is not None:
        return "the row " + shown(data)
    if data is None:
        return "NULL"
    return f"binary {shown(data)}" if type(data) is bytes else f"`{data}`"


def table() -> str:
    lines = ["| `put_data(…)` | `schema` | Python batcher | Spark batcher |", "|---|---|---|---|"]
    for schema, expressions in ((None, PLAIN), ("x int, t string", BY_SCHEMA)):
        for text in expressions:
            value = eval(text, dict(KNOWN))
            cells = [f"`{text}`", f"`{schema}`" if schema else "", in_python(value, schema)]
            lines.append(f"| {' | '.join([*cells, in_spark(value, schema)])} |")
    return "\n".join(lines)


def test_the_page_contains_the_batch_table():
    assert table() in PAGE.read_text("utf-8"), "in docs/semantics.md put:\n" + table()
