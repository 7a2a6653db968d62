"""The race as a table, as a page of the documentation, and as its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

TITLES = {
    "rabbitmq": "RabbitMQ",
    "kafka": "Apache Kafka",
    "sqs": "Amazon SQS, by moto's server",
}
_COLUMNS = {
    "name": "peer",
    "rate": "msg/s",
    "ratio": "ratio",
    "cpu": "CPU µs",
    "p50": "p50 s",
    "p99": "p99 s",
    "kills": "kills",
    "lost": "lost",
    "doubled": "doubled",
    "lines": "lines",
}
_SECTION = """## {title}: {messages:,} messages

{at}; medians of {tries}, at most {kills} kills (seed {seed}); a load average of {load} at the end.
"""
HEAD = f"{'peer':<36}" + "".join(f"{title:>9}" for title in list(_COLUMNS.values())[1:])

Row = Mapping[str, Any]


def line(row: Row) -> str:
    """Returns a row of the table on the screen."""
    name = f"{row['name']} ({row['broker']})"
    return f"{name:<36}" + "".join(f"{_text(row[key]):>9}" for key in list(_COLUMNS)[1:])


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def write(results: Mapping[str, Any], docs: Path) -> None:
    """Writes the page and its plot.

    :param results: The results by broker.
    """
    parts = [Path(__file__).with_suffix(".md").read_text("utf-8")]
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for broker, title in TITLES.items():
        if broker in results:
            result = results[broker]
            parts += [_SECTION.format(title=title, **result), _table(result["figures"])]
            rows += result["figures"]
            left_out |= result["left_out"]
    parts.append("## Configuration of each peer\n\n| peer | release | |\n|---|---|---|")
    seen = {(row["name"], row["version"], row["settings"]): None for row in rows}
    parts += [f"| {name} | {version} | {_code(settings)} |" for name, version, settings in seen]
    if left_out:
        parts.append("\nLeft out:\n")
        parts += [f"- {name}: {reason}." for name, reason in left_out.items()]
    (docs / "race.md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    (docs / "race.svg").write_text(plot(rows), encoding="utf-8")


def _table(rows: Sequence[Row]) -> str:
    lines = [f"| {' | '.join(_COLUMNS.values())} |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]
    lines += [f"| {' | '.join(_text(row[key]) for key in _COLUMNS)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def plot(rows: Sequence[Row]) -> str:
    """Draws the ratio of each peer as a bar, with the rows that it lost or doubled."""
    width, left, step = 760, 240, 24
    rows = [row for row in rows if row["ratio"] is not None]
    widest = max((row["ratio"] for row in rows), default=1.0)
    bars: list[str] = []
    y = 10
    for broker, title in TITLES.items():
        lanes = [row for row in rows if row["broker"] == broker]
        if not lanes:
            continue
        y += step
        bars.append(f'<text x="10" y="{y}" font-weight="bold">{escape(title)}</text>')
        for row in lanes:
            y += step
            size = round(row["ratio"] / widest * (width - left - 260))
            color = "#3f51b5" if row["name"].startswith("airflow-broadway") else "#90a4ae"
            note = f"{row['ratio']:g} · {row['lost']:,} lost, {row['doubled']:,} doubled"
            bars += [
                f'<text x="{left - 10}" y="{y}" text-anchor="end">{escape(row["name"])}</text>',
                f'<rect x="{left}" y="{y - 12}" width="{size}" height="16" fill="{color}"/>',
                f'<text x="{left + size + 8}" y="{y}">{note}</text>',
            ]
    height = y + step
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' font-family="sans-serif" font-size="13" fill="#607d8b" role="img">\n'
        "<title>Throughput relative to a loop, and rows lost or doubled by kills</title>\n"
        + "\n".join(bars)
        + "\n</svg>\n"
    )
