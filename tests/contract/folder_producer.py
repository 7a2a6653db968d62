"""A folder of files as a queue: the complete producer of ``docs/producers.md``.

A message is a file.  Its name is its receipt, and its time of modification is the timestamp from
which it is visible; each step is one call of the file system, which does it whole or not at all::

    messages/<message id>~<deliveries>
    dead/<message id>.json      dead letters, those of one request
    state/…                     the records of the custody engine

Receiving a message renames its file, so that older receipts are void.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Entry, QueueDepth
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import TEXT
from airflow_broadway.producers.engine.port import (
    Answer,
    Broker,
    Contents,
    DeadLetterTarget,
    Hidden,
    Publisher,
    Received,
    Refusal,
)
from airflow_broadway.producers.engine.producer import BrokerProducer
from airflow_broadway.producers.kit.state_files import StateFiles

TAKEN = Refusal("Taken", "another consumer has received the message", invalid=True)


@options
class FolderProducer(BrokerProducer):
    """Messages from a folder of files."""

    kind: ClassVar[str] = "folder"

    path: str = option(rule=TEXT, doc="The folder: an absolute path, the same for every task.")

    def broker(self, env: ProducerEnv) -> FolderBroker:
        return FolderBroker(self, env)


@contextmanager
def translated() -> Iterator[None]:
    """Errors of the client are errors of this package: callers see no others."""
    try:
        yield
    except OSError as error:
        raise ProducerUnavailable(f"the folder cannot be used just now: {error}") from error


class Folder:
    """The client: for the adapter, and for senders.

    :param clock: Whose time messages are hidden by.
    """

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self.name, self.path = path, Path(path)
        self._clock = clock or SystemClock()
        self.messages = self.path / "messages"
        for name in ("new", "messages", "dead"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def send(self, bodies: Iterable[bytes], now: datetime) -> None:
        for place, body in enumerate(bodies):
            stamp = f"{now.timestamp():017.6f}-{place:09d}-{uuid.uuid4().hex[:8]}"
            new = self.path / "new" / stamp
            new.write_bytes(body)
            os.utime(new, (now.timestamp(), now.timestamp()))
            new.rename(self.messages / f"{stamp}~0")

    def remove(self, receipts: Sequence[str]) -> Mapping[int, Refusal]:
        return self._each(receipts, lambda receipt: (self.messages / receipt).unlink())

    def hide(self, entries: Sequence[Hidden]) -> Mapping[int, Refusal]:
        return self._each(entries, lambda entry: self.hide_one(*entry))

    def hide_one(self, receipt: str, seconds: float) -> None:
        """Hides a message for so long.

        :raises FileNotFoundError: If the receipt is void.
        """
        until = self.now() + seconds
        os.utime(self.messages / receipt, (until, until))

    def _each(self, entries: Sequence[Any], call: Callable[[Any], None]) -> dict[int, Refusal]:
        """Carries out entries one by one; returns the refused ones by their place."""
        refused: dict[int, Refusal] = {}
        for place, entry in enumerate(entries):
            with translated():
                try:
                    call(entry)
                except FileNotFoundError:
                    refused[place] = TAKEN
        return refused

    def now(self) -> float:
        return self._clock.now().timestamp()

    def visible(self) -> list[str]:
        now = self.now()
        names: list[str] = []
        for file in self.messages.iterdir():
            with suppress(FileNotFoundError):  # another consumer has received or removed it
                names += [file.name] * (file.stat().st_mtime <= now)
        return sorted(names)

    def close(self) -> None:
        """Holds nothing open."""


class FolderBroker(Broker[Folder]):
    """The folder as a broker of the custody engine."""

    service: ClassVar[str] = "the folder"
    queue_word: ClassVar[str] = "folder"
    removes_once: ClassVar[bool] = True
    max_hide: ClassVar[int] = 10**9
    kept_days: ClassVar[int] = 365

    def __init__(self, producer: FolderProducer, env: ProducerEnv) -> None:
        super().__init__(producer, env)
        self._path = producer.path
        self.max_fetch, self.interval = 1000, 0.02

    def open(self) -> Folder:
        with translated():
            return Folder(self._path, self.clock)

    @property
    def place(self) -> str:
        return self._path

    def state_files(self) -> StateFiles:
        return StateFiles(Path(self._path).as_uri(), "state")

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, count: int) -> Answer:
        folder = self.client
        at = folder.now()
        messages: list[Received] = []
        with translated():
            for name in folder.visible():
                message_id, deliveries = name.split("~")
                receipt = f"{message_id}~{int(deliveries) + 1}"
                with suppress(FileNotFoundError):  # another consumer was faster
                    folder.hide_one(name, self.seconds)
                    made = (folder.messages / name).rename(folder.messages / receipt)
                    body = made.read_bytes()
                    messages.append(Received(message_id, receipt, body, int(deliveries) + 1))
                if len(messages) == count:
                    break
        return Answer(at, messages)

    def read(self, received: Received) -> Contents:
        return Contents(received.raw, {})

    # -- settling ------------------------------------------------------------------------------

    def dead_letter_target(self) -> DeadLetterTarget:
        dead = StateFiles(Path(self._path).as_uri(), "dead")

        def make(entry: Entry) -> dict[str, Any]:
            body = (entry.payload or b"").decode("latin-1")
            return {"id": entry.message_id, "body": body, "reason": entry.verdict.reason}

        def send(letters: Sequence[dict[str, Any]]) -> Mapping[int, Refusal]:
            dead.write(f"{letters[0]['id']}.json", list(letters))  # durable when it returns
            return {}

        write = Publisher(send, "write", lambda letter: len(letter["body"]), 1000, 10_000_000)
        return DeadLetterTarget(write, make)

    # -- looking -------------------------------------------------------------------------------

    def depth(self) -> QueueDepth:
        with translated():
            ready = len(self.client.visible())
            hidden = len(os.listdir(self.client.messages)) - ready
            dead = (self.client.path / "dead").glob("*.json")
            letters = sum(len(json.loads(file.read_bytes())) for file in dead)
        return QueueDepth(ready, 0, hidden, letters, None)
