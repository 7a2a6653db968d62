"""A run's report as Markdown: the same text for the same report, and no text of others acts in it.

A pure function of ``report.json``, for the file beside it and for the page of a run.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.text import printable

#: What Markdown may act on, besides HTML.
_ACTS: Final = re.compile(r"([\\`*_{}\[\]()#+\-.!|~:@/])")


def plain(text: object) -> str:
    """Text of others, on one line, of which Markdown makes neither marks, links nor HTML."""
    return _ACTS.sub(r"\\\1", html.escape(printable(text), quote=False))


def markdown_of(report: Mapping[str, Any]) -> str:
    """The report: what came of the run, then figures, reasons, batchers, executions.

    :param report: As the ack sensor keeps it in ``report.json``.
    """
    totals = report["totals"]
    rows = [(name, totals[key]) for key, name in _CLASSES.items() if totals.get(key) is not None]
    about = f"Run {plain(report['run_id'])} of the Dag {plain(report['dag_id'])}"
    parts = [
        f"# {plain(report['pipeline'])}",
        f"{about}, accounted for at {plain(report['at'])}.",
        "\n".join(f"- {plain(line)}" for line in lines_of(report) if not line.startswith("  ")),
        *_table("Messages", ("Class", "Messages"), rows),
        *_table(
            "Reasons",
            ("Messages", "Stage", "Reason"),
            [(each["count"], each["stage"], each["reason"]) for each in report.get("reasons", ())],
        ),
        *_table(
            "Batchers",
            ("Batcher", "Batches", "Messages", "Failed messages", "Seconds"),
            [
                (name, each["batches"], each["messages"], each["failed"], each["seconds"])
                for name, each in sorted(report.get("batchers", {}).items())
            ],
        ),
        *_table(
            "Executions",
            ("Generation", "Task", "Try", "Received", "Stopped by"),
            [
                (
                    each["generation"],
                    each["task_id"] + (f"[{each['map_index']}]" if each["map_index"] >= 0 else ""),
                    each["try_number"],
                    each["received"],
                    each["stopped"],
                )
                for each in report.get("generations", ())
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


_CLASSES: Final = {"received": "received", **CLASSES}


def _table(head: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A headed table; nothing if it has no row."""
    if not rows:
        return []
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = [columns, ["--:" if right else "---" for right in numeric]]
    cells = [[_cell(each) for each in row] for row in rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *cells))
    return [f"## {head}", table]


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else plain(value)
