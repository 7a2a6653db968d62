"""Failed messages of runs without a broker, stored in the archive and read as dead letters."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow as pa

from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, Moved, Moving
from airflow_broadway.core.custody.protocol import Entry, Lease
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.archive.table import FAILED
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder

_NOT_REQUEUED: Final = (
    "the archive, or its run, has it still: run the interval, or that run, again, and delete this"
)


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


class ArchiveLetters:
    """The dead letters of a pipeline's archive: lines of one file per execution."""

    def __init__(self, archive: Folder) -> None:
        self._archive = archive

    @property
    def place(self) -> str:
        """The folder of the files."""
        return f"{self._archive.path}/{FAILED}"

    def count(self) -> int:
        """Counts the dead letters."""
        return sum(1 for _ in self.letters())

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """Yields the selected dead letters, by file."""
        for name in self._archive.list(FAILED):
            for _, letter in self._read(name):
                if choice.takes(letter):
                    yield letter

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """Refuses to requeue: failed messages are still in the archive or their run."""
        moving = Moving(choice)
        for letter in self.letters():
            if moving.takes(letter):
                moving.refused[letter.message_id] = _NOT_REQUEUED
        return moving.result()

    def delete(self, choice: Choice = EVERY) -> Moved:
        """Deletes the selected dead letters file by file; not atomic across files."""
        moving = Moving(choice)
        for name in self._archive.list(FAILED):
            lines = list(self._read(name))
            remaining = [line for line, letter in lines if not moving.takes(letter)]
            moving.count += len(lines) - len(remaining)
            path = f"{FAILED}/{name}"
            if not remaining:
                self._archive.remove(path)
            elif len(remaining) < len(lines):
                self._archive.replace(path, "\n".join([*remaining, ""]))
        return moving.result()

    def close(self) -> None:
        """Does nothing: no connection is open."""

    def _read(self, name: str) -> Iterator[tuple[str, DeadLetter]]:
        path = f"{FAILED}/{name}"
        for line in self._archive.lines(path):
            value = read_json(line, f"{self._archive.path}/{path}")
            yield line, _parse_letter(value, name.removesuffix(".jsonl"))


def _parse_letter(value: Mapping[str, Any], generation: str) -> DeadLetter:
    properties = {name: value[name] for name in ("time", "source") if value.get(name) is not None}
    if value.get("metadata"):
        properties["metadata"] = json.loads(value["metadata"])
    return DeadLetter(
        message_id=value["message_id"],
        body=base64.b64decode(value.get("payload") or ""),
        properties=properties,
        reason=value["reason"],
        stage=value["stage"],
        attempt=1,
        enqueued_at=None,
        died_at=datetime.fromisoformat(value["at"]),
        generation=generation,
        origin=f"run {value.get('run_id')} of {value.get('dag_id')}",
        original_id=value["message_id"],
    )
