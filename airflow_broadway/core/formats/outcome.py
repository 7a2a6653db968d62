"""The outcome of a batch: the file whose existence settles its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION, SealedFile
from airflow_broadway.core.formats.sums import checked
from airflow_broadway.core.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(SealedFile):
    """The outcome of one batch; its existence settles the batch's messages.

    :param plan: The path of the batch's plan.
    :param successful: Messages that succeeded.
    :param failed: Messages that failed.
    :param missing: Messages for which ``handle_batch`` returned no outcome: each has an entry that
        releases it.
    :param lines: The batch's exceptions, the messages whose verdict is not that of a plain success,
        as lines of a file of entries; ``None`` if there are none, or too many.
    :param entries: The file of exceptions, if they are many.
    :param entries_sum: Its line count, bytes and SHA-256.
    :param error: Why the whole batch failed; empty otherwise.
    :param writer: The try that handled it, for display: task, try and host.
    :param try_number: The try number of its task, from 1.
    :param started_at: When its handling began, as ISO 8601.
    :param seconds: How long its handling took.
    :param application_id: Spark's id of the application; empty without Spark.
    :param settled_now: A :class:`SettleReport` of the messages that callbacks settled immediately,
        as JSON.
    :param parts: The parts that the batch was split into because it killed processes, as in plans;
        the other fields are empty then, and each part has an outcome of its own.
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
    parts: list[dict[str, Any]] | None = None
    version: int = VERSION
    release: str = __version__

    @property
    def exceptions(self) -> str | None:
        """The path of its exceptions: a file of entries, or the outcome itself."""
        return paths.outcome(self.plan, self.batch_id) if self.lines else self.entries


def entry_lines(files: Files, path: str, total: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Iterates over the lines of a file of entries, or of an outcome that contains them.

    :param path: :attr:`Outcome.exceptions`, or any file of entries.
    :param total: The file's sum, if known.
    :raises StagingDamaged: At the latest at the end, if they are corrupt.
    """
    if not path.endswith(".json"):
        yield from checked(files.lines(path), total, path)
        return
    try:
        text = files.read(path)
    except FileNotFoundError:
        raise StagingDamaged(f"{path} is missing") from None
    yield from Outcome.loads(text, path).lines or ()
