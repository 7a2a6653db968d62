"""The manifest of a generation: what one execution of a process task received and staged.

It is created once, and last: an execution that dies before it never happened.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_broadway.core.formats.layout import VERSION, load
from airflow_broadway.core.formats.sums import sealed
from airflow_broadway.core.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The files of a generation.

    :param batchers: Batcher → messages staged for it; a batcher without any is missing.
    :param files: Batcher → its Parquet files, in order of arrival.
    :param entries: Files of entries: one line for each message that is in no batcher's files.
    :param configured: Whether any staged message has an ack configuration of its own.
    :param dropped: Column → messages that carried it although the schema lacks it.
    :param sums: Lines, bytes and SHA-256 of each file of entries, by its path.
    """

    batchers: dict[str, int]
    files: dict[str, list[str]]
    entries: list[str]
    configured: bool
    dropped: dict[str, int]
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Messages in these files: as many as were received."""
        return sum(self.batchers.values()) + sum(int(each["lines"]) for each in self.sums.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Staged):
    """What one execution of a process task received, and the files that it made of it.

    :param generation: The execution; the folder's name.
    :param root_id: The staging root that it was written under.
    :param host: The host that wrote it, for people.
    :param lease: The :class:`Lease` as it was then, as JSON.
    :param received: Messages received.
    :param received_bytes: Bytes of their payloads together.
    :param failed: Of these, failed before any batch.
    :param settled_now: A :class:`SettleReport` of what callbacks settled at once, as JSON.
    :param stopped: Why receiving ended: ``"empty"``, ``"max_messages"``, ``"max_bytes"``,
        ``"max_seconds"``, ``"rate_limiting"``, ``"error"``, or the reason of a stop from outside.
    :param archived: Its files for the archive, which get there when it is settled.
    :param seconds: Seconds spent in receiving (``receive``), and in all (``total``); and for how
        long, at the most, a message had waited at its broker (``waited``), where that is known.
    """

    generation: str
    root_id: str
    host: str
    lease: dict[str, Any]
    received: int
    received_bytes: int
    failed: int
    settled_now: dict[str, Any]
    stopped: str
    started_at: str
    ended_at: str
    seconds: dict[str, float] = field(default_factory=dict)
    archived: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION
    release: str = __version__

    def reference(self) -> dict[str, Any]:
        """Return the reference of a process task in XCom: a few hundred bytes, no payload."""
        return {
            "generation": self.generation,
            "root_id": self.root_id,
            "host": self.host,
            "received": self.received,
            "failed": self.failed,
            "batchers": self.batchers,
            "stopped": self.stopped,
        }

    def dumps(self) -> str:
        """Return it as JSON, with its seal."""
        value = asdict(self)
        if not self.archived:  # as releases wrote it that have no archive
            del value["archived"]
        return sealed(value, sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Manifest:
        """Read what :meth:`dumps` wrote; errors as of :func:`read_json`."""
        return load(cls, text, path)
