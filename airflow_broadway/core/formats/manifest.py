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
        *.entries.jsonl                 entries of its exceptions, named by the outcome; few of them
                                        are in the outcome itself
        gathered-*.jsonl                copies of many outcomes, to be read at once
    work/<task>-<try>.json              what a Spark application does; a higher try fences it off
    tries/<task>-<try>.json             a task runs the batches of a Python batcher; the same
    heartbeat.json                      when the ack sensor last looked

All paths in these files are relative to the run's folder.  JSON lines and Parquet only: nothing
that a reader executes.  ``version`` is raised when an old reader could misread a file; a reader
that meets a newer one refuses with one clear error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.entries import EntryLine, dump_entry, load_line
from airflow_broadway.core.formats.sums import check_seal, checked, sealed

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
    "digest_of",
    "dump_entry",
    "load_line",
    "paths",
    "plain_key",
    "read_json",
]

#: The version of all formats here.
VERSION = 1


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
    def gathered(plan: str, writer: str, number: int) -> str:
        return f"{paths.outcomes(plan)}/gathered-{writer}-{number:04d}.jsonl"

    @staticmethod
    def is_gathered(name: str) -> bool:
        """Whether a name in the folder of outcomes is one of :meth:`gathered`."""
        return name.startswith("gathered-") and name.endswith(".jsonl")

    @staticmethod
    def work(name: str, try_number: int) -> str:
        return f"work/{name}-{try_number:06d}.json"

    @staticmethod
    def python_try(name: str, try_number: int) -> str:
        return f"tries/{name}-{try_number:06d}.json"


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

    :raises StagingDamaged: If it is not as it was written.
    :raises StagingError: If a newer release wrote it; names the file.
    """
    try:
        value: dict[str, Any] = json.loads(text)
        value.get("version")
    except (ValueError, AttributeError) as error:
        raise StagingDamaged(f"{path} is damaged ({error})") from error
    check_version(value, path)
    if value.pop("seal", None):
        check_seal(text, path)
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
    :param sums: Lines, bytes and SHA-256 of each file of entries, by its path.
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
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = VERSION

    def dumps(self) -> str:
        return sealed(asdict(self), sort_keys=True)

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
    :param lines: Lines, bytes and SHA-256 of what follows the header.
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
    lines: dict[str, Any] | None = None
    version: int = VERSION

    def dumps(self) -> str:
        return sealed(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, files: Files, path: str) -> tuple[BatchPlan, Iterator[PlannedBatch]]:
        """The header, and the batches streamed in order.

        :raises StagingDamaged: Now, or at the latest when the last batch has been streamed, if the
            file is not as it was written.
        :raises StagingError: If a newer release wrote it, or it names files elsewhere.
        :raises FileNotFoundError: If there is none.
        """
        name = f"{path}/plan.jsonl"
        lines = files.lines(name)
        first = next(lines, None)
        if first is None:
            raise StagingDamaged(f"{name} is empty")
        head = cls(**read_json(first, name))
        if head.path != path or any("/" in each or "\\" in each for each in head.data):
            raise StagingError(f"{name} names files outside its folder: somebody has changed it")
        return head, head._batches(lines, name)

    def _batches(self, lines: Iterator[str], name: str) -> Iterator[PlannedBatch]:
        for line in checked(lines, self.lines, name):
            try:
                batch = PlannedBatch(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise StagingDamaged(f"{name} is damaged ({error})") from error
            yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one batch; its existence is what settles its messages.

    :param lines: Its exceptions, each message whose verdict is not that of a plain success, as the
        lines of a file of entries; ``None`` if there are none, or too many.
    :param entries: The file that has them if they are many.  ``entries_sum``: its lines, bytes and
        SHA-256.
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
    lines: list[str] | None = None
    entries: str | None = None
    entries_sum: dict[str, Any] | None = None
    error: str = ""
    writer: str = ""
    try_number: int = 1
    started_at: str = ""
    seconds: float = 0.0
    application_id: str = ""
    settled_now: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def exceptions(self) -> str | None:
        """The path of what has its exceptions: a file of entries, or the outcome itself."""
        return paths.outcome(self.plan, self.batch_id) if self.lines else self.entries

    def dumps(self) -> str:
        """Return it as JSON, on one line."""
        return sealed(asdict(self), sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Outcome:
        return cls(**read_json(text, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one Spark application is to do: all that the driver needs, and no secret.

    It names a class, so its :attr:`digest` goes to the driver on the command line: who may write
    into the staging folder decides nothing about the code that runs.

    :param name: The task's name in the staging folder; with ``try_number`` the fence.
    :param pipeline: The pipeline's reference.
    :param run: :class:`RunInfo` as JSON.
    :param plans: Paths of plans, in order.
    :param package_version: This package's version, logged by the driver.
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

    @property
    def digest(self) -> str:
        """The SHA-256 of :meth:`dumps`, in hexadecimal."""
        return digest_of(self.dumps())

    @classmethod
    def loads(cls, text: str, path: str) -> Work:
        return cls(**read_json(text, path))


def digest_of(text: str) -> str:
    """The SHA-256 of a file's text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def plain_key(key: Any) -> Any:
    """A batch key as the pipeline gave it: JSON made lists, which no key can be, of its tuples."""
    return tuple(plain_key(each) for each in key) if isinstance(key, list) else key
