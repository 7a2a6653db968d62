"""Failed messages of runs without a broker, as dead letters."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, Moved, Moving
from airflow_broadway.core.formats.layout import read_json
from airflow_broadway.staging.archive.layout import FAILED
from airflow_broadway.staging.store import Folder

_NOT_REQUEUED: Final = (
    "the archive, or its run, has it still: run the interval, or that run, again, and delete this"
)


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
            kept = [line for line, letter in lines if not moving.takes(letter)]
            moving.count += len(lines) - len(kept)
            path = f"{FAILED}/{name}"
            if not kept:
                self._archive.remove(path)
            elif len(kept) < len(lines):
                self._archive.replace(path, "\n".join([*kept, ""]))
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
