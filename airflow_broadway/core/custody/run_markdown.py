"""Renders a run's report as Markdown; text from outside is escaped and cannot add markup.

A pure function of ``report.json``, for the file next to it and for the page of a run.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.text import printable

#: Characters that Markdown may interpret, besides HTML.
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]()#+\-.!|~:@/])")


def plain(text: object) -> str:
    """Escapes text from outside: one line, without Markdown markup, links or HTML."""
    return _SPECIAL.sub(r"\\\1", html.escape(printable(text), quote=False))


def markdown_of(report: Mapping[str, Any]) -> str:
    """Renders the report: summary, then counts, reasons, batchers, executions.

    :param report: As the ack sensor keeps it in ``report.json``.
    """
    classes = [
        {"class": name, "messages": report["totals"].get(key)}
        for key, name in {"received": "received", **CLASSES}.items()
    ]
    batchers = [{"name": name, **row} for name, row in sorted(report.get("batchers", {}).items())]
    title = f"Run {plain(report['run_id'])} of the Dag {plain(report['dag_id'])}"
    parts = [
        f"# {plain(report['pipeline'])}",
        f"{title}, accounted for at {plain(report['at'])}.",
        "\n".join(f"- {plain(line)}" for line in lines_of(report) if not line.startswith("  ")),
        *_table("Messages", _MESSAGES, [row for row in classes if row["messages"] is not None]),
        *_table("Reasons", _REASONS, report.get("reasons", ())),
        *_table("Batchers", _BATCHERS, batchers),
        *_table("Executions", _EXECUTIONS, list(map(_execution, report.get("generations", ())))),
    ]
    return "\n\n".join(parts) + "\n"


#: The columns of each table: title → key of a row.
_MESSAGES: Final = {"Class": "class", "Messages": "messages"}
_REASONS: Final = {"Messages": "count", "Stage": "stage", "Reason": "reason"}
_BATCHERS: Final = {
    "Batcher": "name",
    "Batches": "batches",
    "Messages": "messages",
    "Failed messages": "failed",
    "Seconds": "seconds",
}
_EXECUTIONS: Final = {
    "Generation": "generation",
    "Task": "task",
    "Try": "try_number",
    "Received": "received",
    "Stopped by": "stopped",
}


def _execution(row: Mapping[str, Any]) -> dict[str, Any]:
    index = f"[{row['map_index']}]" if row["map_index"] >= 0 else ""
    return {**row, "task": row["task_id"] + index}


def _table(head: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Renders a table with a heading; nothing if it has no rows."""
    if not rows:
        return []
    keys = columns.values()
    numeric = [all(isinstance(row[key], int | float) for row in rows) for key in keys]
    lines = [list(columns), ["--:" if right else "---" for right in numeric]]
    lines += [[_cell(row[key]) for key in keys] for row in rows]
    return [f"## {head}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else plain(value)
