"""Counts the rows of a peer, with the time at which each file became visible to a reader."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class RowCounts(NamedTuple):
    """The rows of a pass.

    :param lost: Messages without a row.
    :param doubled: Further rows of messages that already have a row.
    """

    lost: int
    doubled: int


def count_rows(numbers: Iterable[int], sent: int) -> RowCounts:
    """Compares the numbers of the rows with those sent: 0 to ``sent - 1``.

    :raises ValueError: If a row has a number that was not sent.
    """
    counts = Counter(numbers)
    if unknown := counts.keys() - range(sent):
        raise ValueError(f"rows of messages that were not sent: {sorted(unknown)[:5]}")
    return RowCounts(sent - len(counts), counts.total() - len(counts))


class Rows:
    """The rows below a folder.

    :param folder: Names below it that begin with ``_`` or ``.`` are hidden.  With
        ``_spark_metadata``, the log of Structured Streaming, only the files that it lists are
        visible.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._counts: dict[tuple[Path, float], int] = {}

    def files(self) -> dict[Path, float]:
        """Returns the visible files, each with the Unix time at which it became visible."""
        log = self.folder / "_spark_metadata"
        if log.is_dir():
            return self._spark_files(log)
        visible = {}
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name[0] not in "_."]
            for name in names:
                if name.endswith(".parquet") and name[0] not in "_.":
                    with suppress(FileNotFoundError):
                        path = Path(folder, name)
                        visible[path] = path.stat().st_ctime
        return visible

    def _spark_files(self, log: Path) -> dict[Path, float]:
        visible: dict[Path, float] = {}
        for batch in sorted(log.iterdir(), key=lambda path: path.stat().st_ctime):
            if batch.name.startswith("."):
                continue
            for line in batch.read_text().splitlines()[1:]:
                path = Path(json.loads(line)["path"].removeprefix("file://"))
                visible.setdefault(path, batch.stat().st_ctime)
        return visible

    def count(self, without: Container[Path] = ()) -> int:
        """Returns the number of rows; an incomplete file has none.

        :param without: Excluded files.
        """
        total = 0
        for path, at in self.files().items():
            if path not in without:
                key = path, at
                if key not in self._counts:
                    self._counts[key] = _read(path, "n").length()
                total += self._counts[key]
        return total

    def numbers(self, without: Container[Path] = ()) -> Iterator[int]:
        """Reads the messages' numbers."""
        for path in self.files():
            if path not in without:
                yield from _read(path, "n").to_pylist()

    def latencies(self, without: Container[Path] = ()) -> list[float]:
        """Returns the seconds from a message's sending until its row was visible, sorted."""
        return sorted(
            at - sent
            for path, at in self.files().items()
            if path not in without
            for sent in _read(path, "sent").to_pylist()
        )


def _read(path: Path, column: str) -> Any:
    """Reads a column; an incomplete file has no rows."""
    try:
        return pq.ParquetFile(path).read([column])[column]
    except (OSError, pa.ArrowInvalid):
        return pa.chunked_array([], pa.null())
