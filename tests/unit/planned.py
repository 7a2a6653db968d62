"""A batch of a plan with defaults for all other fields."""

from __future__ import annotations

from typing import Any

from airflow_broadway.core.formats.plan import PlannedBatch


def planned_batch(batch_id: str = "b0", **fields: Any) -> PlannedBatch:
    place: dict[str, Any] = {"rows": [[0, 0]], "files": [0], "sources": {}, "redelivered": 0}
    key: dict[str, Any] = {"batch_key": "default", "keys": 1, "partition": None}
    size: dict[str, Any] = {"size": 1, "bytes": 1, "trigger": "size"}
    return PlannedBatch(batch_id=batch_id, **{**place, **key, **size, **fields})
