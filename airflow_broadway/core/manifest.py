"""The formats of a run's files, which the worker and the Spark driver both read and write.

Everything of one run lies under one folder, ``<root>/<pipeline>/<dag_id>/<encoded run_id>/``::

    generations/<generation>.json       a generation was opened (before its first receive)
    <generation>/
        messages/<batcher>/*.parquet    messages that wait for a batcher
        failed-*.jsonl                  entries of messages that no batcher gets
        manifest.json                   written once, exclusively: only now is the execution real
        lease.json                      the lease as last renewed
        journal-intent.json             settling has begun (exclusive)
        journal-settled.json            settling is done: the report (exclusive)
    batches/<batcher>/<inputs>/<try>/
        data-*.parquet                  messages in batch order, with a ``batch`` column
        plan.jsonl                      a header line, then a line per batch
    outcomes/<batcher>/<inputs>/
        <batch_id>.json                 what became of a batch: the first writer wins (exclusive)
        *.entries.jsonl                 entries of its exceptions, named by the outcome
    work/<task>-<try>.json              what a Spark application does; a higher try fences it off
    heartbeat.json                      when the ack sensor last looked

All paths in these files are relative to the run's folder.  JSON lines and Parquet only: nothing
that a reader executes.  ``version`` is raised when an old reader could misread a file; a reader
that meets a newer one refuses with one clear error.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from airflow_broadway.core.custody import Action, Entry, Verdict
from airflow_broadway.core.errors import StagingError

__all__ = [
    "VERSION",
    "BatchPlan",
    "EntryLine",
    "Files",
    "Manifest",
    "Outcome",
    "PlannedBatch",
    "Work",
    "check_version",
    "dump_entry",
    "load_entry",
    "load_line",
    "paths",
    "plain_key",
    "read_json",
]

#: The version of all formats here.
VERSION = 1
#: Bytes of a reason that are kept; brokers limit headers.
MAX_REASON = 2048


class Files(Protocol):
    """Reads and writes small files of one run; implemented over fsspec, Hadoop and plain files.

    Paths are relative to the run's folder.
    """

    def read(self, path: str) -> str:
        """The file's text.

        :raises FileNotFoundError: If there is none.
        """
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if there is no such folder."""
        ...

    def create(self, path: str, text: str) -> bool:
        """Write a whole file unless it exists, durable, all or nothing; whether it did."""
        ...

    def replace(self, path: str, text: str) -> None:
        """Write a whole file, replacing any: durable and all or nothing."""
        ...

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        """Write a new file of lines, streamed; how many.  Publish its name only afterwards."""
        ...

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a file, streamed."""
        ...


class paths:  # noqa: N801 - a namespace
    """Where each file lies in the run's folder."""

    HEARTBEAT = "heartbeat.json"
    GENERATIONS = "generations"

    @staticmethod
    def generation(generation: str) -> str:
        return f"generations/{generation}.json"

    @staticmethod
    def manifest(generation: str) -> str:
        return f"{generation}/manifest.json"

    @staticmethod
    def lease(generation: str) -> str:
        return f"{generation}/lease.json"

    @staticmethod
    def intent(generation: str) -> str:
        return f"{generation}/journal-intent.json"

    @staticmethod
    def settled(generation: str) -> str:
        return f"{generation}/journal-settled.json"

    @staticmethod
    def outcomes(plan: str) -> str:
        """Where the outcomes of a plan lie, and of its rebuilds from the same generations.

        Those of other generations lie elsewhere: messages that were received anew may come in the
        same batches, under the same ids, and are to be handled all the same.
        """
        _, _, place = plan.rpartition("/")[0].partition("/")
        return f"outcomes/{place}"

    @staticmethod
    def outcome(plan: str, batch_id: str) -> str:
        return f"{paths.outcomes(plan)}/{batch_id}.json"

    @staticmethod
    def outcome_entries(plan: str, batch_id: str, writer: str) -> str:
        return f"{paths.outcomes(plan)}/{batch_id}.{writer}.entries.jsonl"

    @staticmethod
    def work(name: str, try_number: int) -> str:
        return f"work/{name}-{try_number:06d}.json"


def check_version(value: Mapping[str, Any], path: str) -> None:
    """Refuse a file that a newer release wrote.

    :raises StagingError: Naming the file, both versions and the cure.
    """
    version = value.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise StagingError(
            f"{path} has format version {version!r}; this release reads up to {VERSION}:"
            " use the release of airflow-broadway that wrote it, or a newer one"
        )


def read_json(text: str, path: str) -> dict[str, Any]:
    """The JSON object of a versioned file.

    :raises StagingError: If it is damaged, or a newer release wrote it; names the file.
    """
    try:
        value: dict[str, Any] = json.loads(text)
        value.get("version")
    except (ValueError, AttributeError) as error:
        raise StagingError(
            f"{path} is damaged ({error}): restore it, or remove the run's folder once its lease"
            " has lapsed"
        ) from error
    check_version(value, path)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one execution of a process task received and made of it.

    :param generation: The execution; the folder's name.
    :param root_id: The staging root that it was written under.
    :param host: The host that wrote it, for people.
    :param received: Messages received.
    :param received_bytes: Their payloads together.
    :param failed: Of these, failed before any batch.
    :param settled_now: A :class:`SettleReport` of what callbacks settled at once, as JSON.
    :param batchers: Batcher → messages staged for it.
    :param files: Batcher → its Parquet files, in order of arrival.
    :param entries: Files of entries: one line for each message that is in no batcher's files.
        So ``received`` is the sum of ``batchers`` and of the lines here.
    :param configured: Whether any staged message has an ack configuration of its own.
    :param dropped: Column → messages that carried it although the schema lacks it.
    :param stopped: Why receiving ended: ``"empty"``, ``"max_messages"``, ``"max_bytes"``,
        ``"max_seconds"``, ``"own"`` (met its own), ``"signal"`` or ``"rate_limit"``.
    """

    generation: str
    root_id: str
    host: str
    lease: dict[str, Any]
    received: int
    received_bytes: int
    failed: int
    settled_now: dict[str, Any]
    batchers: dict[str, int]
    files: dict[str, list[str]]
    entries: list[str]
    configured: bool
    dropped: dict[str, int]
    stopped: str
    started_at: str
    ended_at: str
    seconds: dict[str, float] = field(default_factory=dict)
    version: int = VERSION

    def dumps(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Manifest:
        return cls(**read_json(text, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """One batch of a plan.

    :param rows: Inclusive ranges ``[first, last]`` of the ``batch`` column in the data files.
    :param files: Indices into the plan's data files that hold any of its rows.
    :param batch_key: JSON value; ``None`` for a merged batch.
    :param keys: How many keys it carries; 1 unless merged.
    :param sources: Generation → messages of it in the batch.
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

    def dumps(self) -> str:
        # asdict copies deeply, and a plan may have 100,000 of these.
        value = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batches of one batcher in one run; the header of ``plan.jsonl``.

    :param path: Where it lies: the folder, relative to the run's.
    :param generations: Those whose messages it holds, in the order of the ``source`` column.
    :param data: Names of the data files in the folder.
    :param schema: The batcher's schema DDL; ``None`` without.
    :param as_bytes: Without a schema: whether ``data`` is binary (else JSON text).
    :param batches: How many lines follow.
    :param triggers: Trigger → batches.
    :param notes: What people should know, e.g. that there are very many batches, and the cure.
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
    notes: list[str] = field(default_factory=list)
    version: int = VERSION

    def dumps(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, files: Files, path: str) -> tuple[BatchPlan, Iterator[PlannedBatch]]:
        """The header, and the batches streamed in order."""
        lines = files.lines(f"{path}/plan.jsonl")
        head = read_json(next(lines), f"{path}/plan.jsonl")
        return cls(**head), (PlannedBatch(**json.loads(line)) for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one batch; its existence is what settles its messages.

    :param entries: The file of its exceptions: each message whose verdict is not that of a plain
        success; ``None`` if there are none.
    :param successful: Messages that succeeded.
    :param failed: Messages that failed.
    :param missing: Messages that ``handle_batch`` (Python) did not return: they have an entry that
        releases them.
    :param error: Why the whole batch failed; empty otherwise.
    :param writer: Who wrote it: task try and host.
    """

    batch_id: str
    batcher: str
    plan: str
    successful: int
    failed: int
    missing: int = 0
    entries: str | None = None
    error: str = ""
    writer: str = ""
    try_number: int = 1
    started_at: str = ""
    seconds: float = 0.0
    application_id: str = ""
    settled_now: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def dumps(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Outcome:
        return cls(**read_json(text, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one Spark application is to do: all that the driver needs, and no secret.

    :param name: The task's name in the staging folder; with ``try_number`` the fence.
    :param pipeline: The pipeline's reference.
    :param run: :class:`RunInfo` as JSON.
    :param plans: Paths of plans, in order.
    :param version_of_package: This package's version, logged by the driver.
    """

    name: str
    try_number: int
    pipeline: dict[str, Any]
    run: dict[str, Any]
    plans: list[str]
    package_version: str = ""
    version: int = VERSION

    def dumps(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Work:
        return cls(**read_json(text, path))


def plain_key(key: Any) -> Any:
    """A batch key as the pipeline gave it: JSON made lists, which no key can be, of its tuples."""
    return tuple(plain_key(each) for each in key) if isinstance(key, list) else key


def dump_entry(entry: Entry, *, source: int | None = None, settled: bool = False) -> str:
    """One line of an entries file.

    :param source: In a batch of several generations: whose message it is, the row's ``source``.
    :param settled: A callback settled it at once: it only says that nothing is left to do.
    """
    value: dict[str, Any] = {
        "id": entry.message_id,
        "action": entry.verdict.action.value,
        "attempt": entry.attempt,
    }
    if entry.receipt:
        value["receipt"] = entry.receipt
    if entry.verdict.delay:
        value["delay"] = round(entry.verdict.delay, 3)
    if entry.verdict.reason:
        value["reason"] = cut(entry.verdict.reason, MAX_REASON)
    if entry.verdict.stage:
        value["stage"] = entry.verdict.stage
    if entry.payload is not None:
        value["payload"] = base64.b64encode(entry.payload).decode("ascii")
    if entry.properties is not None:
        value["properties"] = entry.properties
    if source is not None:
        value["source"] = source
    if settled:
        value["settled"] = True
    return json.dumps(value, separators=(",", ":"))


class EntryLine(NamedTuple):
    """A line of an entries file, whole; see :func:`dump_entry`."""

    entry: Entry
    source: int | None
    settled: bool


def load_entry(line: str) -> Entry:
    """Read the entry that :func:`dump_entry` wrote."""
    return _entry(json.loads(line))


def load_line(line: str) -> EntryLine:
    """Read all that :func:`dump_entry` wrote."""
    value = json.loads(line)
    return EntryLine(_entry(value), value.get("source"), value.get("settled", False))


def _entry(value: Mapping[str, Any]) -> Entry:
    payload = value.get("payload")
    return Entry(
        value["id"],
        value.get("receipt", ""),
        Verdict(
            Action(value["action"]),
            value.get("delay", 0.0),
            value.get("reason", ""),
            value.get("stage", ""),
        ),
        value.get("attempt", 1),
        None if payload is None else base64.b64decode(payload),
        value.get("properties"),
    )


def cut(text: str, limit: int) -> str:
    """``text`` cut to ``limit`` bytes of UTF-8, at a character's edge."""
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= limit else raw[: limit - 3].decode("utf-8", "ignore") + "…"
