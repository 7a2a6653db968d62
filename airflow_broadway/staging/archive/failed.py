"""Stores failed messages of runs without a broker next to the archive, as JSON lines."""

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
    """Stores failed messages, each with its payload if the archive has it.

    :param name: Name of the file; default: that of the generation, which is replaced.
    :raises StagingError: If it cannot be written, or the archive cannot be read.
    """
    payloads = _read_payloads(archive, lease, {entry.message_id for entry in failed})
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


def _read_payloads(archive: Folder, lease: Lease, ids: set[str]) -> dict[str, dict[str, Any]]:
    """Reads time, metadata and payload of messages of the lease's interval."""
    bounds = lease.state.get("interval")
    if not bounds:
        return {}
    interval = Interval(*(datetime.fromisoformat(bound) for bound in bounds))
    payloads: dict[str, dict[str, Any]] = {}
    id_array = array_of(sorted(ids), pa.string())
    for table in tables(archive, look(archive, interval), interval):
        part = table.filter(pc.is_in(table["message_id"], value_set=id_array))
        for row in part.select(["message_id", "time", "payload", "form", "metadata"]).to_pylist():
            payloads[row["message_id"]] = {
                "time": row["time"].isoformat(),
                "metadata": row["metadata"],
                "form": row["form"],
                "payload": base64.b64encode(row["payload"]).decode("ascii"),
            }
    return payloads


def failures(archive: Folder) -> Iterator[Mapping[str, Any]]:
    """Yields all failed messages by file; ``payload`` is Base64 text, and missing if unknown.

    :raises StagingError: If a newer release wrote it, or it is damaged.
    """
    for name in archive.list(FAILED):
        path = f"{FAILED}/{name}"
        for line in archive.lines(path):
            yield read_json(line, f"{archive.path}/{path}")
