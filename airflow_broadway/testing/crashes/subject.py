"""The subject of a crash test: a pipeline with its own empty queue and folder."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.testing.crashes.boundaries import LocalFiles, Sqlite
from airflow_broadway.testing.crashes.callbacks import Callbacks, RecordedCall
from airflow_broadway.testing.crashes.interceptor import Boundary
from airflow_broadway.testing.crashes.tasks import Attempt, execute

#: The environment variable with the folder of the case, for callbacks; also their working folder.
FOLDER = "BROADWAY_CRASH_FOLDER"


#: Called with the subject, the ids of the sent messages, the recorded calls and the account.
Check = Callable[["Subject", Sequence[str], Sequence[RecordedCall], Any], None]


def enter_case_folder(folder: Path, log: Path, name: str) -> None:
    """Makes the calling fork work in the folder of a case, and write its output to the log.

    :param name: Its name in the log.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = sys.stderr = os.fdopen(handle, "w", buffering=1)
    sys.stdout.write(f"-- {name}\n")
    os.chdir(folder)
    os.environ[FOLDER] = str(folder)


class DeadLetter(NamedTuple):
    """A dead letter.

    :param message_id: The id of the dead-lettered message.
    :param marked: Whether it is marked as a possible duplicate.
    :param reason: The reason, if the broker reports it.
    :param body: The payload, if the broker reports it.
    """

    message_id: str
    marked: bool
    reason: str = ""
    body: bytes = b""


class Subject(ABC):
    """One pipeline, and the operations that the campaign needs on its broker.

    The process that creates it forks the tasks, so connections must not stay open: each method
    opens and closes its own.

    :param folder: An empty folder for this subject.
    """

    #: The duration of its leases in seconds.
    lease: ClassVar[float] = 900.0
    #: Matches the paths of files below the staging root that are permanent.
    permanent: ClassVar[str] = r"^\b$"
    #: The number of runs, a week apart, until retention has removed all old files.
    aging_runs: ClassVar[int] = 1
    #: Whether leases lapse, so that other runs take over messages of a run that is still running.
    lapses: ClassVar[bool] = True
    #: Whether a run is one task that stages nothing, as with BroadwayRunOperator.
    unstaged = False
    #: Whether a run fails to start while another one is active.
    exclusive = False
    #: Further checks of a case: each adds violations to its account.
    checks: Sequence[Check] = ()
    #: Seconds for which the ack sensor holds the messages of failed tasks.
    hold_failed = 0.0

    def __init__(self, pipeline: type[Pipeline], folder: Path) -> None:
        self.pipeline = pipeline
        self.folder = folder
        #: The folder of the pipeline's files: its staging root, and files of its callbacks.
        self.work = folder / "work"
        #: The file in which callback calls are recorded.
        self.calls_file = folder / "witness.jsonl"
        self.work.mkdir()

    @property
    def staging(self) -> str:
        """The staging root."""
        return f"file://{self.work}/staging"

    def boundaries(self) -> list[Boundary]:
        """Returns the boundaries at which the pipeline's external calls are intercepted."""
        return [
            LocalFiles(self.work),
            Sqlite(),
            Callbacks(self.pipeline, self.calls_file, self.id_of),
        ]

    @property
    def salt(self) -> str:
        """Makes this case's ids distinct from those of other cases at the same broker."""
        return self.folder.name

    def id_of(self, message: Message) -> str:
        """Returns a message's id as used by :meth:`send` and :meth:`letters`."""
        return message.message_id

    @abstractmethod
    def overrides(self) -> Mapping[str, Any]:
        """Returns the pipeline's options for this queue."""

    def execute(self, attempt: Attempt) -> Any:
        """Executes a task, in its own process; returns its result for later tasks."""
        pipeline = self.pipeline(**self.overrides())
        return execute(pipeline, self.staging, attempt, hold_failed=self.hold_failed)

    @abstractmethod
    def send(self, bodies: Sequence[bytes]) -> list[str]:
        """Sends messages to the queue, in order; returns their ids."""

    @abstractmethod
    def waiting(self) -> int:
        """Returns the number of messages that are ready, delayed or leased."""

    @abstractmethod
    def letters(self) -> list[DeadLetter]:
        """Returns the dead letters."""

    def restart(self) -> None:
        """Restarts the broker gracefully.

        :raises TypeError: If the subject has no broker process.
        """
        raise TypeError(f"{type(self).__name__} has no broker process to restart")

    def pass_time(self, seconds: float) -> None:  # noqa: B027 - most brokers have no clock to move
        """Advances the broker's own clock together with that of the tasks."""

    def staged(self) -> list[str]:
        """Returns the paths of all files below the staging root."""
        root = self.work / "staging"
        return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]

    def leftovers(self) -> list[str]:
        """Describes resources of finished runs that remain at the broker."""
        return []

    def prepare(self) -> None:  # noqa: B027 - most are new
        """Empties stores outside the folder; called before the first message is sent."""

    def rows(self, ids: Sequence[str]) -> Counter[str] | None:
        """Returns the rows of the sink as text; ``None`` without a sink.

        :param ids: The ids of all messages; rows contain their numbers instead.
        :raises ForkError: If it cannot be read.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Removes the subject's resources at the broker."""


class Embedded(Subject):
    """A pipeline over the embedded queue."""

    def overrides(self) -> Mapping[str, Any]:
        producer = self.pipeline.producer
        return {
            "producer": SqliteProducer(
                queue="crashes",
                path=str(self.work / "queue.db"),
                lease=self.lease,
                retry=producer.retry,
                concurrency=producer.concurrency,
                transformer=producer.transformer,
                **{
                    name: getattr(producer, name)
                    for name in ("on_success", "on_failure")
                    if getattr(producer, name) in SqliteProducer.actions
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

    def letters(self) -> list[DeadLetter]:
        with self._queue() as queue:
            return [
                DeadLetter(letter.message_id, False, letter.reason, letter.body)
                for letter in queue.dead_letters(limit=None)
            ]

    def leftovers(self) -> list[str]:
        with self._queue() as queue:
            return [f"an open lease of generation {row.lease.generation}" for row in queue.leases()]
