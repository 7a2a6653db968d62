"""What failed in runs that no broker serves, as dead letters for people."""

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

_NOWHERE: Final = (
    "the archive, or its run, has it still: run the interval, or that run, again, and delete this"
)


class ArchiveLetters:
    """The dead letters of a pipeline's archive: lines of files, a file for each execution."""

    def __init__(self, archive: Folder) -> None:
        self._archive = archive

    @property
    def place(self) -> str:
        """The folder."""
        return f"{self._archive.path}/{FAILED}"

    def count(self) -> int:
        """How many there are."""
        return sum(1 for _ in self.letters())

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """Those that are chosen, by file."""
        for name in self._archive.list(FAILED):
            for _, letter in self._read(name):
                if choice.takes(letter):
                    yield letter

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """Nothing can be sent back: what failed was never taken away from where it came from."""
        moving = Moving(choice)
        for letter in self.letters():
            if moving.takes(letter):
                moving.refused[letter.message_id] = _NOWHERE
        return moving.result()

    def delete(self, choice: Choice = EVERY) -> Moved:
        """Remove those that are chosen; whoever is killed on the way has removed some files'."""
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
        """Nothing is open."""

    def _read(self, name: str) -> Iterator[tuple[str, DeadLetter]]:
        path = f"{FAILED}/{name}"
        for line in self._archive.lines(path):
            value = read_json(line, f"{self._archive.path}/{path}")
            yield line, _letter(value, name.removesuffix(".jsonl"))


def _letter(value: Mapping[str, Any], generation: str) -> DeadLetter:
    about = {name: value[name] for name in ("time", "source") if value.get(name) is not None}
    if value.get("metadata"):
        about["metadata"] = json.loads(value["metadata"])
    return DeadLetter(
        message_id=value["message_id"],
        body=base64.b64decode(value.get("payload") or ""),
        properties=about,
        reason=value["reason"],
        stage=value["stage"],
        attempt=1,
        enqueued_at=None,
        died_at=datetime.fromisoformat(value["at"]),
        generation=generation,
        origin=f"run {value.get('run_id')} of {value.get('dag_id')}",
        original_id=value["message_id"],
    )
