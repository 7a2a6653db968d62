"""Sinks: tables and folders to which each batch's rows are committed exactly once.

A batch's rows are committed together with the batch's *commit id*, atomically.  So the table itself
answers whether a commit has landed, and can refuse one that comes too late: *ruling out* an id
writes a tombstone under the key that a commit uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.connections import Connections, NoConnections
from airflow_broadway.core.model.run_source import Interval


@dataclass(frozen=True, slots=True)
class Rows:
    """The result of ``handle_batch`` of a batcher with a sink, if messages failed.

    All messages that are not in ``failed`` succeed once the rows are committed.

    :param rows: The rows to commit: with Spark a DataFrame, with Python a list of dicts or a
        ``pyarrow.Table``.
    :param failed: The failed messages.  With Spark: the result of ``failed(…)``, or a list of
        these; with Python: a list of messages, each as returned by its ``failed(reason)``.
    """

    rows: Any
    failed: Any = ()


class SinkError(BroadwayError):
    """A sink cannot commit or read: the message names the table, the cause and the way out."""


class SinkWarning(UserWarning):
    """A sink cannot rule each commit out for certain."""


class CommitRefused(SinkError):
    """The commit id was ruled out, or another attempt's commit has landed: nothing was written."""


class CommitInDoubt(SinkError):
    """A commit may have landed or may still land: its batch has no outcome yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One batch's commit, or a deletion.

    :param commit_id: Identifies the commit, at most 64 characters of ``[0-9a-z.-]``.  The same for
        all attempts at one batch of the same generations; never used by other batches.
    :param batch: ``None`` for a deletion.
    :param attempt: The number of this attempt, from 1; stored with the commit.
    """

    commit_id: str
    attempt: int
    batch: BatchInfo | None
    pipeline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkEnv:
    """Holds the connections of a sink that is opened.

    :param connections: Resolves Airflow connections; in a Spark driver, those that the sink names.
    """

    connections: Connections = field(default_factory=NoConnections)


class SinkClient(ABC):
    """An open sink; used by one thread at a time, and closed by its caller."""

    @abstractmethod
    def commit(self, rows: Any, commit: Commit) -> None:
        """Commits the rows and the commit id in one transaction.

        Returns only once :meth:`landed` would report this attempt.

        :param rows: A Spark DataFrame for :meth:`Sink.open_spark`, a ``pyarrow.Table`` for
            :meth:`Sink.open`.
        :raises CommitRefused: If the id was ruled out, or another attempt landed.
        :raises SinkError: If nothing of this attempt has landed, and nothing can.
        :raises Exception: Any other: the commit may have landed, or may still land.  The caller
            rules it out.
        """

    @abstractmethod
    def landed(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        """Returns the attempt of each commit that has landed, by commit id."""

    @abstractmethod
    def rule_out(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        """Makes sure that none of these commits can land any more.

        Writes a tombstone for each that has not landed; idempotent.

        :returns: The attempt of each that has landed, as :meth:`landed`; the others never land.
        :raises SinkError: If the table cannot be written; then call it again.
        """

    def delete(self, interval: Interval, commit: Commit) -> None:
        """Deletes the rows of an interval by the sink's ``time_column``, and records the commit id.

        Both are one transaction; errors as in :meth:`commit`.
        """
        raise NotImplementedError(f"{type(self).__name__} deletes no rows")

    def close(self) -> None:  # noqa: B027 - most clients have nothing to close
        """Releases connections."""


class Sink(ABC):
    """A table or folder; frozen options until it is opened.

    :cvar spark_note: The reason, if it does not define :meth:`open_spark`, and the way out.
    """

    spark_note: ClassVar[str] = "without open_spark, use engine='python'"
    #: The column whose values lie in the interval of a backfill; ``None`` keeps its earlier rows.
    time_column: str | None = None

    @property
    @abstractmethod
    def uri(self) -> str:
        """The table's address without credentials; its asset, lineage dataset and log name."""

    @property
    def commits_uri(self) -> str:
        """The address of what records its commits, which alone can rule them out."""
        return self.uri

    def caveat(self, engine: str) -> str:
        """Returns why a commit might land although it was ruled out; empty if it cannot.

        :param engine: The engine of the batcher, which warns of it when it is declared.
        """
        return ""

    @property
    def connection_ids(self) -> tuple[str, ...]:
        """Ids of the Airflow connections that it needs."""
        return ()

    @abstractmethod
    def open(self, env: SinkEnv) -> SinkClient:
        """Opens it in a process with Python alone.

        :raises SinkError: If it cannot be reached or read.
        """

    def open_spark(self, spark: Any, env: SinkEnv) -> SinkClient:
        """Opens it in a Spark driver.

        :param spark: The batch's own session.
        :raises SinkError: If it cannot be reached or read.
        """
        raise NotImplementedError(f"{type(self).__name__} supports no Spark batchers")
