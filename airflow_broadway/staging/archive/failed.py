"""What failed in runs that no broker serves: kept beside the archive, one JSON object a line."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from airflow_broadway.core.custody.protocol import Entry, Lease
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.staging.archive.layout import FAILED
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder


def put_failed(
    archive: Folder, lease: Lease, failed: Sequence[Entry], at: datetime, *, name: str = ""
) -> None:
    """Keep messages that failed, each with its payload where the archive has it.

    :param name: Of the file; the generation's, which is written anew, unless given.
    :raises StagingError: If it cannot be written, or the archive not be read.
    """
    payloads = _payloads(archive, lease, {entry.message_id for entry in failed})
    lines = [
        json.dumps(
            {
                "version": VERSION,
                "message_id": entry.message_id,
                "reason": entry.verdict.reason,
                "stage": entry.verdict.stage,
                "dag_id": lease.owner.get("dag_id"),
                "run_id": lease.owner.get("run_id"),
                "source": lease.kind,
                "at": at.isoformat(),
                **payloads.get(entry.message_id, {}),
            }
        )
        for entry in failed
    ]
    archive.replace(f"{FAILED}/{name or lease.generation}.jsonl", "\n".join([*lines, ""]))


def _payloads(archive: Folder, lease: Lease, ids: set[str]) -> dict[str, dict[str, Any]]:
    """Time, metadata and payload of messages of the interval that the lease names."""
    given = lease.state.get("interval")
    if not given:
        return {}
    interval = Interval(*(datetime.fromisoformat(each) for each in given))
    found: dict[str, dict[str, Any]] = {}
    wanted = array_of(sorted(ids), pa.string())
    for table in tables(archive, look(archive, interval), interval):
        part = table.filter(pc.is_in(table["message_id"], value_set=wanted))
        for row in part.select(["message_id", "time", "payload", "form", "metadata"]).to_pylist():
            found[row["message_id"]] = {
                "time": row["time"].isoformat(),
                "metadata": row["metadata"],
                "form": row["form"],
                "payload": base64.b64encode(row["payload"]).decode("ascii"),
            }
    return found


def failures(archive: Folder) -> Iterator[Mapping[str, Any]]:
    """All that is kept, by file; ``payload`` is Base64 text, and missing where it is not known.

    :raises StagingError: If a newer release wrote it, or it is damaged.
    """
    for name in archive.list(FAILED):
        path = f"{FAILED}/{name}"
        for line in archive.lines(path):
            yield read_json(line, f"{archive.path}/{path}")
