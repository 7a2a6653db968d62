"""A folder of files as a queue: the complete producer of ``docs/producers.md``.

A message is a file, and what is known of it is its name; what happens to it is a rename, which the
file system does whole or not at all::

    ready/<from when on>~<message id>~<attempt>~<redelivered>
    leases/<until>~<generation>/<message id>~<attempt>~<redelivered>
    dead/<message id>~<attempt>~<redelivered>
    state/…                     a log for each generation, and why messages are dead

A lease is a folder.  To renew it is to rename it, and so is to end one that has lapsed: of two who
try at the same instant one does.  Instants are microseconds since 1970, in twenty digits.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import (
    Custodian,
    Delivery,
    Entry,
    Lease,
    QueueDepth,
    Settlement,
    Source,
)
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed, ProducerUnavailable
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import TEXT
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.generation_log import GenerationLog
from airflow_broadway.producers.kit.plan import end_by_log, settle_by_log, settle_now_by_log
from airflow_broadway.producers.kit.polling_source import PollingSource
from airflow_broadway.producers.kit.state_files import StateFiles, digest

#: An instant before all others.
ENDED = f"{0:020d}"


@options
class FolderProducer(Producer):
    """Messages from a folder of files."""

    kind: ClassVar[str] = "folder"

    path: str = option(rule=TEXT, doc="The folder: an absolute path, the same for every task.")

    def source(self, env: ProducerEnv) -> Source:
        return FolderSource(self, env)

    def custodian(self, env: ProducerEnv) -> Custodian:
        return FolderCustodian(self, env)

    def depth(self, env: ProducerEnv) -> QueueDepth:
        return Folder(self.path).depth(env.clock.now())


@contextmanager
def translated() -> Iterator[None]:
    """Errors of the client are errors of this package: callers see no others."""
    try:
        yield
    except OSError as error:
        raise ProducerUnavailable(f"the folder cannot be used just now: {error}") from error


def stamp(instant: datetime) -> str:
    return f"{round(instant.timestamp() * 1_000_000):020d}"


class Folder:
    """The queue itself: for both halves, and for whoever sends."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.files = StateFiles(self.path.as_uri(), "state")
        for name in ("new", "ready", "leases", "dead"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def send(self, bodies: Iterable[bytes], now: datetime) -> None:
        for place, body in enumerate(bodies):
            message_id = f"{stamp(now)}-{place:09d}-{uuid.uuid4().hex[:8]}"
            new = self.path / "new" / message_id
            new.write_bytes(body)
            new.rename(self.path / "ready" / f"{stamp(now)}~{message_id}~1~0")

    def depth(self, now: datetime) -> QueueDepth:
        waiting = os.listdir(self.path / "ready")
        ready = sum(name[:20] <= stamp(now) for name in waiting)
        leased = len([*(self.path / "leases").glob("*/*")])
        dead = len(os.listdir(self.path / "dead"))
        return QueueDepth(ready, len(waiting) - ready, leased, dead, None)

    def log(self, key: str) -> GenerationLog:
        return GenerationLog(self.files, key)

    def lease(self, key: str) -> Path | None:
        """The folder of a generation's lease; ``None`` if it holds nothing yet, or has ended."""
        return next((self.path / "leases").glob(f"*~{key}"), None)

    def hold(self, key: str, until: datetime) -> Path | None:
        """Hold a lease until an instant; its folder, ``None`` if it has ended."""
        lease, name = self.lease(key), f"{stamp(until)}~{key}"
        with suppress(FileNotFoundError):  # ended just now
            return None if lease is None else lease.rename(lease.with_name(name))
        return None

    def held(self, key: str) -> dict[str, Path]:
        """What a lease holds: message id → file."""
        lease = self.lease(key)
        files = [] if lease is None else [lease / name for name in os.listdir(lease)]
        return {file.name.partition("~")[0]: file for file in files}

    def end_lapsed(self, now: datetime) -> None:
        """Give back what lapsed leases hold."""
        for lease in (self.path / "leases").iterdir():
            until, _, key = lease.name.partition("~")
            if until <= stamp(now):
                with suppress(FileNotFoundError):  # renewed, or ended by another, just now
                    lease.rename(lease.with_name(f"{ENDED}~{key}"))
                    report = SettleReport(lapsed=len(self.held(key)))
                    end_by_log(self.log(key), report, {}, partial(self.end, key, now))

    def end(self, key: str, now: datetime, verdicts: Mapping[str, Verdict]) -> None:
        """Carry verdicts out, give back all else that a lease holds, and remove it."""
        while (lease := self.lease(key)) is not None:
            for message_id, file in self.held(key).items():
                self.carry_out(file, verdicts.get(message_id, RELEASE), now)
            with suppress(OSError):  # something came into it meanwhile
                lease.rmdir()

    def carry_out(self, file: Path, verdict: Verdict, now: datetime) -> None:
        """Carry out one verdict, unless another has done so."""
        message_id, attempt, _ = file.name.split("~")
        after = int(attempt) + (verdict.action is Action.RETRY)
        ready = stamp(now + timedelta(seconds=verdict.delay))
        if verdict.action is Action.LEAVE:  # until the lease would have lapsed
            ready = file.parent.name[:20]
        with suppress(FileNotFoundError):
            if verdict.action is Action.ACK:
                file.unlink()
            elif verdict.action is Action.DEAD_LETTER:
                self.files.write(f"dead/{message_id}.json", [verdict.reason, verdict.stage])
                file.rename(self.path / "dead" / file.name)
            else:
                file.rename(self.path / "ready" / f"{ready}~{message_id}~{after}~1")


class FolderSource(PollingSource):
    """Receives for one generation."""

    def __init__(self, producer: FolderProducer, env: ProducerEnv) -> None:
        super().__init__(producer, env, {"queue": producer.path})
        self._folder, self._key = Folder(producer.path), digest(env.generation)
        self._seen: set[str] = set()

    @translated()
    def take(self, demand: int, position: int, deadline: datetime) -> list[Message]:
        now, ready = self._clock.now(), self._folder.path / "ready"
        self._folder.end_lapsed(now)
        found = [name for name in sorted(os.listdir(ready)) if name[:20] <= stamp(now)]
        # What this run itself has given back is not received again.
        fresh = [name for name in found if name.split("~")[1] not in self._seen]
        messages: list[Message] = []
        lease = self._lease_until(deadline) if fresh else ready
        for name in fresh[:demand]:
            _, message_id, attempt, redelivered = name.split("~")
            with suppress(FileNotFoundError):  # another has taken it
                body = (ready / name).rename(lease / name.partition("~")[2]).read_bytes()
                self._seen.add(message_id)
                made = Message(
                    body,
                    message_id=message_id,
                    attempt=int(attempt),
                    redelivered=redelivered == "1",
                    acknowledger=AckRef(None, self.lease.generation, Delivery()),
                    received_at=now,
                    position=position + len(messages),
                    size=len(body),
                )
                messages.append(made)
        return messages

    def _lease_until(self, deadline: datetime) -> Path:
        """The lease's folder; made for its first message."""
        lease = self._folder.hold(self._key, deadline)
        if lease is None:
            if self._seen or self._folder.log(self._key).names():
                raise LeaseLapsed(f"the lease of generation {self.lease.generation!r} has ended")
            lease = self._folder.path / "leases" / f"{stamp(deadline)}~{self._key}"
            lease.mkdir()
        return lease


class FolderCustodian:
    """Renews and settles any generation of the folder."""

    def __init__(self, producer: FolderProducer, env: ProducerEnv) -> None:
        self._producer, self._clock, self._folder = producer, env.clock, Folder(producer.path)

    def _key(self, lease: Lease) -> str:
        return digest(check_lease(lease, "folder", self._producer.path).generation)

    @translated()
    def renew(self, lease: Lease) -> Lease | None:
        deadline = self._clock.now() + timedelta(seconds=lease.seconds)
        if not self.holds(lease) or self._folder.hold(self._key(lease), deadline) is None:
            return None
        return replace(lease, deadline=deadline)

    @translated()
    def holds(self, lease: Lease) -> bool:
        held = self._folder.lease(self._key(lease))
        return held is not None and held.name[:20] > stamp(self._clock.now())

    @translated()
    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        folder, key, now = self._folder, self._key(lease), self._clock.now()
        held, end = folder.held(key).keys(), partial(folder.end, key, now)
        return settle_by_log(folder.log(key), held, settlement, end)

    @translated()
    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        folder, key, now = self._folder, self._key(lease), self._clock.now()
        held = folder.held(key)

        def carry_out(verdicts: Mapping[str, Verdict]) -> None:
            for message_id, verdict in verdicts.items():
                folder.carry_out(held[message_id], verdict, now)

        return settle_now_by_log(folder.log(key), held.keys(), entries, carry_out)

    def close(self) -> None:
        pass
