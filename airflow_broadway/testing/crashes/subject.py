"""What is put to the test: a pipeline over an empty queue of its own, in a folder of its own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.testing.crashes.callbacks import Callbacks
from airflow_broadway.testing.crashes.files import LocalFiles
from airflow_broadway.testing.crashes.interceptor import Boundary
from airflow_broadway.testing.crashes.sqlite import Sqlite
from airflow_broadway.testing.crashes.tasks import Attempt, execute

#: The environment variable by which callbacks find the folder of their case; it is their current
#: one as well.
FOLDER = "BROADWAY_CRASH_FOLDER"


class Letter(NamedTuple):
    """A dead letter.

    :param message_id: Of the message that died.
    :param marked: Whether it says that there may be another of it.
    :param reason: Why it died, where that is told.
    :param body: What the message held, where that is told.
    """

    message_id: str
    marked: bool
    reason: str = ""
    body: bytes = b""


class Subject(ABC):
    """One pipeline, and what the campaign must be able to do with its broker.

    The process that makes it forks the tasks, so it opens nothing that a fork could not share: each
    method opens and closes what it needs.

    :param folder: Empty, and its own.
    """

    #: Of the broker, in reports.
    kind: ClassVar[str]
    #: Seconds of its leases.
    lease: ClassVar[float] = 900.0
    #: Whether a clock that is moved moves the leases too; else their time must really pass.
    moved_by_clock: ClassVar[bool] = True
    #: Matches the paths of files below the staging root that outlive all runs.
    stays: ClassVar[str] = r"^\b$"
    #: Runs until all that is old is cleared away, each a week after the one before.
    looks: ClassVar[int] = 1
    #: Whether leases lapse, so that others take what a run holds that is still running.
    lapses: ClassVar[bool] = True
    #: Whether a run is one task that stages nothing, as BroadwayRunOperator's.
    unstaged = False
    #: Seconds for which the ack sensor holds what failed tasks received.
    hold_failed = 0.0

    def __init__(self, pipeline: type[Pipeline], folder: Path) -> None:
        self.pipeline = pipeline
        self.folder = folder
        (folder / "work").mkdir()

    @property
    def work(self) -> Path:
        """Where the pipeline's files are: its staging, and what its callbacks write."""
        return self.folder / "work"

    @property
    def staging(self) -> str:
        """The staging root."""
        return f"file://{self.work}/staging"

    @property
    def witness(self) -> Path:
        """Where the calls of the callbacks are written down."""
        return self.folder / "witness.jsonl"

    def boundaries(self) -> list[Boundary]:
        """What of the world the pipeline can touch."""
        return [LocalFiles(self.work), Sqlite(), Callbacks(self.pipeline, self.witness, self.id_of)]

    @property
    def salt(self) -> str:
        """What tells the ids that are made in this case from those of others at the same broker."""
        return self.folder.name

    def id_of(self, message: Message) -> str:
        """The id under which :meth:`send` and :meth:`letters` know a message."""
        return message.message_id

    def archived_id(self, row: Mapping[str, Any]) -> str:
        """The same of a row of the archive, with its ``message_id`` and ``metadata``."""
        return str(row["message_id"])

    @abstractmethod
    def overrides(self) -> Mapping[str, Any]:
        """The options with which the pipeline runs on the queue."""

    def execute(self, attempt: Attempt) -> Any:
        """Execute a task, in its own process; returns what later tasks get of it."""
        pipeline = self.pipeline(**self.overrides())
        return execute(pipeline, self.staging, attempt, hold_failed=self.hold_failed)

    @abstractmethod
    def send(self, bodies: Sequence[bytes]) -> list[str]:
        """Put messages into the queue, in order; returns their ids."""

    @abstractmethod
    def waiting(self) -> int:
        """Messages that are ready, delayed or held."""

    @abstractmethod
    def letters(self) -> list[Letter]:
        """The dead letters."""

    def restart(self) -> None:
        """End the broker in order, and start it again.

        :raises TypeError: If there is none that can.
        """
        raise TypeError(f"{type(self).__name__} has no broker that could be restarted")

    def pass_time(self, seconds: float) -> None:  # noqa: B027 - most brokers have no clock to move
        """Let the broker's own clock go on, as the one of the tasks has."""

    def group_of(self, place: int) -> str | None:
        """The message group, whose order is kept, of the message at a place."""
        return None

    def staged(self) -> list[str]:
        """The paths of all files below the staging root."""
        root = self.work / "staging"
        return [
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, names in os.walk(root)
            for name in names
        ]

    def left(self) -> list[str]:
        """What of a finished run is still at the broker, in words."""
        return []

    def prepare(self) -> None:  # noqa: B027 - most are new
        """Empty what is not in the folder; called before anything is sent."""

    def rows(self, ids: Sequence[str]) -> Counter[str] | None:
        """What the pipeline's sink holds, each row as text; ``None``: there is none to look at.

        :param ids: Of all messages; in rows their places stand for them.
        :raises SinkError: If it cannot be read.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Remove what is at the broker."""


class Embedded(Subject):
    """A pipeline over the embedded queue."""

    kind = "sqlite"

    def overrides(self) -> Mapping[str, Any]:
        declared = self.pipeline.producer
        return {
            "producer": SqliteProducer(
                queue="crashes",
                path=str(self.work / "queue.db"),
                lease=self.lease,
                retry=declared.retry,
                concurrency=declared.concurrency,
                transformer=declared.transformer,
                **{
                    name: getattr(declared, name)
                    for name in ("on_success", "on_failure")
                    if getattr(declared, name) in SqliteProducer.actions
                },
            )
        }

    def _queue(self) -> SqliteQueue:
        return SqliteQueue(self.work / "queue.db", "crashes")

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        with self._queue() as queue:
            return queue.send(bodies)

    def waiting(self) -> int:
        with self._queue() as queue:
            depth = queue.depth()
            return depth.ready + depth.delayed + depth.leased

    def letters(self) -> list[Letter]:
        with self._queue() as queue:
            return [
                Letter(each.message_id, False, each.reason, each.body)
                for each in queue.dead_letters(limit=None)
            ]

    def left(self) -> list[str]:
        with self._queue() as queue:
            return [
                f"an open lease of generation {each.lease.generation}" for each in queue.leases()
            ]
