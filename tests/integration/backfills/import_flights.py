"""The worked example of ``docs/backfills.md``: messages that no run has received."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
from deltalake import write_deltalake

pc: Any = pyarrow.compute


def import_flights(path: Path, archive: str) -> None:
    flights = [json.loads(line) for line in path.read_text().splitlines()]
    hours = [datetime.fromisoformat(flight["time_hour"]) for flight in flights]
    times: Any = pa.array(hours, pa.timestamp("us", tz="UTC"))
    rows: dict[str, Any] = {
        "time": times,
        "message_id": [f"{path.name}-{number}" for number in range(len(flights))],
        "payload": [json.dumps(flight).encode() for flight in flights],
        "date": times.cast(pa.date32()),
        "hour": pc.hour(times).cast(pa.int32()),
    }
    write_deltalake(
        archive, pa.table(rows), mode="append", schema_mode="merge", partition_by=["date", "hour"]
    )
