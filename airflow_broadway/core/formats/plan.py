"""The plan of one batcher in one run: the assignment of staged messages to batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION, SealedFile
from airflow_broadway.core.formats.sums import checked
from airflow_broadway.core.model.message import Status
from airflow_broadway.core.model.sink import SinkError
from airflow_broadway.core.version import __version__, known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """One batch of a plan; a line of ``plan.jsonl``.

    :param rows: Inclusive ranges ``[first, last]`` of the ``batch`` column in the data files.
    :param files: The plan's data files that hold any of its rows: indices into their list.
    :param batch_key: The key as a JSON value; ``None`` for a merged batch.
    :param keys: The number of its keys; 1 unless merged.
    :param partition: Its partition; ``None`` without ``partition_by``.
    :param size: The number of messages.
    :param bytes: The approximate bytes of their data.
    :param trigger: Why it was closed: a :class:`Trigger`.
    :param redelivered: How many of its messages may have been handled before.
    :param sources: Generation → number of its messages in the batch.
    :param part: For a part of a split batch: its first and last message, each by the columns
        ``source`` and ``position``; ``None`` for a whole batch.
    :param error: Why it fails unhandled: the splitter's exception on each of its messages.
    """

    batch_id: str
    rows: list[list[int]]
    files: list[int]
    batch_key: Any
    keys: int
    partition: int | None
    size: int
    bytes: int
    trigger: str
    redelivered: int
    sources: dict[str, int]
    part: list[list[int]] | None = None
    error: str = ""

    def dumps(self) -> str:
        """Returns it as JSON on one line."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back."""
        # asdict copies deeply, and a plan may have 100,000 of these.
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def refused(self) -> Status | None:
        """The status with which it fails unhandled, if any."""
        return Status("error", self.error) if self.error else None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PlannedBatch:
        """Reads what :meth:`to_json` wrote; unknown fields are ignored.

        :raises TypeError: If a required field is missing.
        """
        try:
            return cls(**value)
        except TypeError:
            return cls(**known_fields(cls, value))

    def has(self, source: int, position: int) -> bool:
        """Returns whether a message in one of its rows belongs to it."""
        if self.part is None:
            return True
        first, last = self.part
        return first <= [source, position] <= last


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(SealedFile):
    """The batches of one batcher in one run; the header of ``plan.jsonl``.

    :param path: Its folder, relative to the run's.
    :param generations: The generations of its messages, in the order of the ``source`` column.
    :param data: Names of the data files in the folder.
    :param schema: The batcher's schema DDL; ``None`` without.
    :param as_bytes: Without a schema: whether ``data`` is binary (else JSON text).
    :param messages: The number of messages in all batches.
    :param batches: The number of batches, one line each.
    :param triggers: Trigger → batches.
    :param root_id: The staging root that it was written under.
    :param host: The host that wrote it, for display.
    :param sink: Where the batcher's sink recorded commits when it was written; ``None`` without.
    :param notes: Notes for users, e.g. that there are very many batches, and the way out.
    :param lines: Line count, bytes and SHA-256 of what follows the header.
    """

    path: str
    pipeline: str
    batcher: str
    generations: list[str]
    data: list[str]
    schema: str | None
    as_bytes: bool
    messages: int
    batches: int
    triggers: dict[str, int]
    root_id: str
    host: str
    sink: str | None = None
    notes: list[str] = field(default_factory=list)
    lines: dict[str, Any] | None = None
    version: int = VERSION
    release: str = __version__

    @classmethod
    def read(cls, files: Files, path: str) -> tuple[BatchPlan, Iterator[PlannedBatch]]:
        """Returns the header, and an iterator over the batches, streamed in order.

        :raises StagingDamaged: Now, or at the latest when the last batch has been streamed, if the
            file is corrupt.
        :raises StagingError: If a newer release wrote it, or it names files elsewhere.
        :raises FileNotFoundError: If there is none.
        """
        name = f"{path}/plan.jsonl"
        lines = files.lines(name)
        first = next(lines, None)
        if first is None:
            raise StagingDamaged(f"{name} is empty")
        header = cls.loads(first, name)
        if header.path != path or any("/" in file or "\\" in file for file in header.data):
            raise StagingError(f"{name} names files outside its folder: it was modified")
        return header, header._batches(lines, name)

    def check_sink(self, uri: str | None) -> None:
        """Checks that the batcher still has the sink that it had when this plan was written.

        :param uri: Where its commits are recorded now; ``None`` without a sink.
        :raises SinkError: If it has another.
        """
        if uri != self.sink:
            raise SinkError(
                f"the batches in {self.path} were planned for {self.sink or 'no sink'}, but the"
                f" batcher {self.batcher!r} now has {uri or 'no sink'}: deploy the earlier pipeline"
                " until the run is settled, then change its sink; if its path has a template, clear"
                " the run's ack task"
            )

    def _batches(self, lines: Iterator[str], name: str) -> Iterator[PlannedBatch]:
        for line in checked(lines, self.lines, name):
            try:
                batch = PlannedBatch.from_json(json.loads(line))
            except (ValueError, TypeError) as error:
                raise StagingDamaged(f"{name} is damaged ({error})") from error
            yield batch


def reference_without_plan(batcher: str) -> dict[str, Any]:
    """Returns the reference of a batcher's task without messages."""
    return {"plan": None, "batcher": batcher, "messages": 0, "batches": 0}


def plain_key(key: Any) -> Any:
    """Returns the batch key from its JSON, as the pipeline set it.

    A list in it was a tuple: JSON has no tuples, and a list cannot be a key.
    """
    return tuple(plain_key(item) for item in key) if isinstance(key, list) else key
