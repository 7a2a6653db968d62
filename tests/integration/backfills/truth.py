"""Expected rows of flights, by the source file alone, and the written ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def rows_of(flights: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The rows of each day, in no order of theirs."""
    days: dict[str, list[str]] = {}
    for flight in flights:
        days.setdefault(flight["time_hour"][:10], []).append(json.dumps(flight, sort_keys=True))
    return {day: sorted(rows) for day, rows in days.items()}


def written(output: Path) -> dict[str, list[str]]:
    """The rows that lie in each day's folder."""
    days: dict[str, list[str]] = {}
    for path in output.glob("date=*/batch_id=*/flights.jsonl"):
        rows = days.setdefault(path.parts[-3].removeprefix("date="), [])
        rows += [
            json.dumps(json.loads(line), sort_keys=True) for line in path.read_text().splitlines()
        ]
    return {day: sorted(rows) for day, rows in days.items()}
