"""The manifest of a generation: the messages that one execution of a process task received.

It is created once, last: an execution that dies before has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway.core.formats.layout import VERSION, SealedFile
from airflow_broadway.core.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The files of a generation.

    :param batchers: Batcher → messages staged for it; a batcher without any is missing.
    :param files: Batcher → its Parquet files, in order of arrival.
    :param entries: Files of entries: one line for each message that is in no batcher's files.
    :param configured: Whether any staged message has its own ack configuration.
    :param dropped: Column → messages that had it although the schema lacks it.
    :param sums: Line count, bytes and SHA-256 of each file of entries, by its path.
    """

    batchers: dict[str, int]
    files: dict[str, list[str]]
    entries: list[str]
    configured: bool
    dropped: dict[str, int]
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of messages in these files, equal to the number received."""
        return sum(self.batchers.values()) + sum(int(item["lines"]) for item in self.sums.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Staged, SealedFile):
    """The messages that one execution of a process task received, and the files it wrote.

    :param generation: The execution; also its folder's name.
    :param root_id: The staging root that it was written under.
    :param host: The host that wrote it, for display.
    :param lease: The :class:`Lease` at that time, as JSON.
    :param received: Messages received.
    :param received_bytes: The total bytes of their payloads.
    :param failed: How many of them failed before any batch.
    :param already_applied: How many of them were acknowledged at once, since a sink has their rows.
    :param duplicates: How many were acknowledged as copies of others of this generation.
    :param without_identity: How many may be copies of others, which is unknown: they have none.
    :param claims: The number of its files of claims in the applied index.
    :param settled_now: A :class:`SettleReport` of the messages that callbacks settled immediately,
        as JSON.
    :param stopped: Why receiving ended: ``"empty"``, ``"max_messages"``, ``"max_bytes"``,
        ``"max_seconds"``, ``"rate_limiting"``, ``"error"``, or the reason of a stop request.
    :param archived: Its files for the archive, which are archived on settlement.
    :param received_files: Files with all messages as received, for the dead-letter table.
    :param seconds: Seconds of receiving (``receive``) and in total (``total``), and the longest
        time that a message had waited at its broker (``waited``), if known.
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
    archived: Sequence[Sequence[Any]] = ()
    received_files: list[str] = field(default_factory=list)
    already_applied: int = 0
    duplicates: int = 0
    without_identity: int = 0
    claims: int = 0
    version: int = VERSION
    release: str = __version__

    def reference(self) -> dict[str, Any]:
        """Returns the reference of a process task in XCom: a few hundred bytes, no payload."""
        return {
            "generation": self.generation,
            "root_id": self.root_id,
            "host": self.host,
            "received": self.received,
            "failed": self.failed,
            "batchers": self.batchers,
            "stopped": self.stopped,
        }
