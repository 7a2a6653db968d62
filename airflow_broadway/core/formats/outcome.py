"""The outcome of a batch: the file whose existence settles its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION, load, paths
from airflow_broadway.core.formats.sums import checked, sealed
from airflow_broadway.core.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one batch; its existence is what settles its messages.

    :param plan: The path of the batch's plan.
    :param successful: Messages that succeeded.
    :param failed: Messages that failed.
    :param missing: Messages without an outcome, as ``handle_batch`` said nothing of them: each has
        an entry that releases it.
    :param lines: The batch's exceptions, the messages whose verdict is not that of a plain success,
        as lines of a file of entries; ``None`` if there are none, or too many.
    :param entries: The file that has them if they are many.
    :param entries_sum: Its lines, bytes and SHA-256.
    :param error: Why the whole batch failed; empty otherwise.
    :param writer: Who handled it, for people: task, try and host.
    :param try_number: Which try of its task, from 1.
    :param started_at: When its handling began, as ISO 8601.
    :param seconds: How long that took.
    :param application_id: Spark's name of the application; empty without Spark.
    :param settled_now: A :class:`SettleReport` of what callbacks settled at once, as JSON.
    :param parts: The parts that the batch was split into, as plans have batches, because processes
        died of it: it says no more then, and each part has an outcome of its own.
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
        """The path of what has its exceptions: a file of entries, or the outcome itself."""
        return paths.outcome(self.plan, self.batch_id) if self.lines else self.entries

    def dumps(self) -> str:
        """Return it as JSON on one line, with its seal."""
        value = asdict(self)
        if self.parts is None:  # an older release reads it then
            del value["parts"]
        return sealed(value, sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Outcome:
        """Read what :meth:`dumps` wrote; errors as of :func:`read_json`."""
        return load(cls, text, path)


def entry_lines(files: Files, path: str, total: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The lines of a file of entries, or of an outcome that holds them itself.

    :param path: :attr:`Outcome.exceptions`, or any file of entries.
    :param total: The file's sum, where it is known.
    :raises StagingDamaged: At the latest at the end, if they are not as they were written.
    """
    if not path.endswith(".json"):
        yield from checked(files.lines(path), total, path)
        return
    try:
        text = files.read(path)
    except FileNotFoundError:
        raise StagingDamaged(f"{path} is not there") from None
    yield from Outcome.loads(text, path).lines or ()
