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
    totals = report["totals"]
    rows = [(name, totals[key]) for key, name in _CLASSES.items() if totals.get(key) is not None]
    title = f"Run {plain(report['run_id'])} of the Dag {plain(report['dag_id'])}"
    parts = [
        f"# {plain(report['pipeline'])}",
        f"{title}, accounted for at {plain(report['at'])}.",
        "\n".join(f"- {plain(line)}" for line in lines_of(report) if not line.startswith("  ")),
        *_table("Messages", ("Class", "Messages"), rows),
        *_table(
            "Reasons",
            ("Messages", "Stage", "Reason"),
            [(row["count"], row["stage"], row["reason"]) for row in report.get("reasons", ())],
        ),
        *_table(
            "Batchers",
            ("Batcher", "Batches", "Messages", "Failed messages", "Seconds"),
            [
                (name, row["batches"], row["messages"], row["failed"], row["seconds"])
                for name, row in sorted(report.get("batchers", {}).items())
            ],
        ),
        *_table(
            "Executions",
            ("Generation", "Task", "Try", "Received", "Stopped by"),
            [
                (
                    row["generation"],
                    row["task_id"] + (f"[{row['map_index']}]" if row["map_index"] >= 0 else ""),
                    row["try_number"],
                    row["received"],
                    row["stopped"],
                )
                for row in report.get("generations", ())
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


_CLASSES: Final = {"received": "received", **CLASSES}


def _table(head: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Renders a table with a heading; nothing if it has no rows."""
    if not rows:
        return []
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = [columns, ["--:" if right else "---" for right in numeric]]
    cells = [[_cell(value) for value in row] for row in rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *cells))
    return [f"## {head}", table]


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else plain(value)
