"""The embedded queue: named queues of messages in one SQLite file.

A message is *ready*, *delayed* (ready later), *leased* to one generation, or *dead*.  A lease ends
by being settled, released, or found past its deadline by the next receiver; from then on its
generation can change nothing.  Until somebody finds it so, a lease past its deadline may still be
renewed and settled: nobody else has its messages.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, Moved
from airflow_broadway.core.custody.protocol import Entry, QueueDepth, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.sqlite import admin, leases
from airflow_broadway.producers.sqlite.admin import LeaseRecord
from airflow_broadway.producers.sqlite.database import (
    Database,
    OpenQueue,
    from_micros,
    to_micros,
    transaction,
)

if TYPE_CHECKING:
    from typing import Self

#: Seconds for which the report of an ended lease is kept.
RETENTION: Final = 7 * 86_400.0
#: The kind of its leases.
KIND: Final = "sqlite"
#: Ids that may be given in a second before they are ahead of the clock.
_IDS_PER_SECOND = 1 << 20

#: The most bytes of one body: SQLite's limit on a row, less room for the attributes.
MAX_BODY = 999_000_000

#: What may be sent: a body, a body and its attributes, or these and a delay in seconds.
Body = bytes | bytearray | memoryview | str
Sendable = (
    Body | tuple[Body, Mapping[str, Any] | None] | tuple[Body, Mapping[str, Any] | None, float]
)


class SqliteQueue:
    """One named queue; safe to share between threads, and its file between processes.

    Nothing is opened before the first call, and a missing file is made by the first :meth:`send`:
    until then the queue is empty.  Every call is one transaction, on disk when it returns.

    :param path: The file; its folder must exist, on a disk of this machine.
    :param name: The queue's name; several queues may share a file.
    :param busy_timeout: Seconds to wait for another process's write.
    :raises ProducerError: From every method, if the file cannot be used: it names path and cure.
    :raises ProducerUnavailable: The same, where trying again may help: locked, or no room.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        clock: Clock | None = None,
        busy_timeout: float = 30.0,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ProducerError(f"a queue's name is a non-empty string, got: {name!r}")
        self.name = name
        self._clock = clock or SystemClock()
        self._database = Database(path, busy_timeout=busy_timeout)

    @property
    def path(self) -> str:
        """Returns the file, as an absolute path."""
        return str(self._database.path)

    def __repr__(self) -> str:
        return f"SqliteQueue({self.path!r}, {self.name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; the next call opens it again."""
        self._database.close()

    # ---------------------------------------------------------------------------------- sending

    def create(self) -> None:
        """Makes the file and the queue unless they are there; the first message does so, too."""
        with self._made():
            pass

    def send(self, messages: Iterable[Sendable]) -> list[str]:
        """Enqueues all of ``messages``, or none; returns their ids.

        They are collected in memory first: send a stream in portions, of some thousands.

        :raises ProducerError: If a body is neither bytes nor text, or too large, or attributes are
            no JSON object: naming which message.
        """
        now = self._now()
        states: list[tuple[int, int]] = []
        bodies: list[tuple[str | None, bytes]] = []
        plain = (now, now)
        for place, message in enumerate(messages):
            if type(message) is bytes and len(message) <= MAX_BODY:
                states.append(plain)
                bodies.append((None, message))
                continue
            body, attributes, delay = _parts(message, place)
            states.append((now, now + delay))
            bodies.append((attributes, body))
        if not bodies:
            return []
        with self._made() as queue:
            # Ids grow with the clock, so that a file which is restored from a backup does not
            # give those again that the lost file gave after it.
            floor = now // 1_000_000 * _IDS_PER_SECOND
            queue.db.execute(
                "UPDATE sqlite_sequence SET seq = ?1 WHERE name = 'messages' AND seq < ?1",
                (floor,),
            )
            queue.db.executemany(
                f"INSERT INTO messages (queue, enqueued_at, ready_at) VALUES ({queue.id:d}, ?, ?)",
                states,
            )
            last = queue.db.execute("SELECT last_insert_rowid()").fetchone()[0]
            # The only writer, and AUTOINCREMENT: the ids are without a gap.
            first = last - len(bodies) + 1
            queue.db.executemany(
                "INSERT INTO bodies VALUES (?, ?, ?)",
                ((row, *body) for row, body in enumerate(bodies, first)),
            )
        return [queue.id_of(row) for row in range(first, last + 1)]

    # -------------------------------------------------------------------------------- receiving

    def receive(
        self,
        generation: str,
        demand: int,
        *,
        seconds: float = 900.0,
        owner: Mapping[str, Any] | None = None,
        position: int = 0,
    ) -> list[Message]:
        """Leases at most ``demand`` ready messages to ``generation``, for ``seconds`` from now.

        One call takes no more than 64 MiB of bodies beyond its first message.  What
        this generation has given back is not among them.  Leases past their deadline end here.

        :param position: The ``position`` of the first message; the others count on from it.
        :raises LeaseLapsed: If the generation's lease has ended.
        """
        with self._opened() as queue:
            if queue is None or demand < 1:
                return []
            now = self._clock.now()
            return leases.receive(
                queue, leases.Portion(generation, demand, position, now, seconds, owner or {})
            )

    # -------------------------------------------------------------------------------- the lease

    def renew(self, generation: str, seconds: float) -> datetime | None:
        """Extends the lease to ``seconds`` from now; returns its deadline; ``None``: it ended."""
        instant = self._clock.now()
        deadline = to_micros(instant) + leases.micros_of(seconds)
        with self._opened() as queue:
            if queue is None:
                return None
            with transaction(queue.db):
                held = queue.db.execute(
                    "UPDATE leases SET deadline = ?"
                    " WHERE queue = ? AND generation = ? AND state = 'open'",
                    (deadline, queue.id, generation),
                ).rowcount
        return from_micros(deadline) if held else None

    def holds(self, generation: str) -> bool:
        """Whether the lease is open and its deadline is still to come."""
        with self._opened() as queue:
            if queue is None:
                return False
            held = queue.db.execute(
                "SELECT 1 FROM leases WHERE queue = ? AND generation = ? AND state = 'open'"
                " AND deadline > ?",
                (queue.id, generation, self._now()),
            )
            return held.fetchone() is not None

    def settle(
        self, generation: str, settlement: Settlement, *, state: str = "settled"
    ) -> SettleReport:
        """Carries out all verdicts on what the generation holds, and ends its lease.

        The report is kept: settling again changes nothing and returns it.  Messages settled early
        by :meth:`settle_now` are no part of it.

        :raises ProducerError: If the lease holds messages that neither ``expected`` nor
            ``everything`` know of, or a verdict names an id of another queue; nothing is done then.
        """
        now = self._now()
        with self._opened() as queue:
            if queue is None:
                named = sum(1 for _ in settlement.entries())
                return SettleReport(lapsed=max(named, settlement.expected or 0))
            report = leases.settle(queue, generation, settlement, now, state=state)
            self._clean(queue.db, now)
        return report

    def settle_now(self, generation: str, entries: Iterable[Entry]) -> SettleReport:
        """Carries out ``entries`` and keeps the lease for the other messages; idempotent."""
        with self._opened() as queue:
            if queue is None:
                ids = frozenset(entry.message_id for entry in entries)
                return SettleReport(lapsed=len(ids), undone=ids)
            return leases.settle_now(queue, generation, entries, self._now())

    def release(self, generation: str) -> SettleReport:
        """Releases everything the generation holds immediately, and ends its lease."""
        return self.settle(generation, Settlement(rest=RELEASE), state="released")

    def _clean(self, db: sqlite3.Connection, now: int) -> None:
        """Deletes the reports of leases that ended long ago."""
        before = now - leases.micros_of(RETENTION)
        old = db.execute("SELECT id FROM leases WHERE ended_at < ?", (before,)).fetchall()
        if old:
            with transaction(db):
                db.executemany("DELETE FROM settled WHERE lease = ?", old)
                db.executemany("DELETE FROM leases WHERE id = ?", old)

    # --------------------------------------------------------------------------------- looking

    def depth(self) -> QueueDepth:
        """Returns how full the queue is; what a lapsed lease held counts as ready."""
        with self._opened() as queue:
            nothing = QueueDepth(0, 0, 0, 0, None)
            return nothing if queue is None else admin.depth(queue, self._now())

    def leases(self, *, ended: bool = False) -> list[LeaseRecord]:
        """Lists the open leases, oldest first; with ``ended`` those still on record too."""
        with self._opened() as queue:
            lease_of = {"kind": KIND, "state": {"path": self.path, "queue": self.name}}
            return [] if queue is None else admin.leases(queue, lease_of, ended=ended)

    def names(self) -> list[str] | None:
        """Returns the names of all queues in the file, sorted; ``None`` if there is no file."""
        with self._database.open(create=False) as db:
            if db is None:
                return None
            return sorted(row[0] for row in db.execute("SELECT name FROM queues"))

    # --------------------------------------------------------------- dead letters and clearing up

    def dead_letters(self, *, limit: int | None = 100, choice: Choice = EVERY) -> list[DeadLetter]:
        """Reads dead letters, in order of their death.

        :param limit: The most to return; ``None`` for all.
        :param choice: Only these.
        """
        return list(islice(self.iter_dead_letters(choice), limit))

    def iter_dead_letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """Reads dead letters, in order of their death, some at a time."""
        with self._opened() as queue:
            if queue is not None:
                yield from admin.letters(queue, choice)

    def requeue_dead(
        self, which: Iterable[str] | Choice | None = None, *, delay: float = 0.0
    ) -> Moved:
        """Puts dead letters back into the queue, on their first attempt, under their old ids.

        :param which: Their ids, or a choice; ``None`` for all.
        :param delay: Seconds until they are ready.
        """
        ready_at = self._now() + leases.micros_of(delay)
        return self._moved(which, lambda queue, choice: admin.requeue(queue, choice, ready_at))

    def purge_dead(self, which: Iterable[str] | Choice | None = None) -> Moved:
        """Deletes dead letters for good, by id, by choice or (``None``) all."""
        return self._moved(which, admin.purge)

    def _moved(
        self,
        which: Iterable[str] | Choice | None,
        move: Callable[[OpenQueue, Choice], Moved],
    ) -> Moved:
        if which is None or isinstance(which, Choice):
            choice = which or EVERY
        else:
            choice = Choice(ids=frozenset(which))
        with self._opened() as queue:
            if queue is None:
                return Moved(0, tuple(sorted(choice.ids or ())))
            return move(queue, choice)

    # -------------------------------------------------------------------------------- the rest

    @contextmanager
    def _opened(self) -> Iterator[OpenQueue | None]:
        """Opens the queue; ``None`` while nothing has ever been sent."""
        with self._database.open(create=False) as db:
            queue = None if db is None else self._queue(db)
            yield queue

    @contextmanager
    def _made(self) -> Iterator[OpenQueue]:
        """Opens the queue in one transaction, and makes it if it is missing."""
        with self._database.open(create=True) as db:
            assert db is not None
            with transaction(db):
                yield self._queue(db) or self._new_queue(db)

    def _now(self) -> int:
        return to_micros(self._clock.now())

    def _queue(self, db: sqlite3.Connection) -> OpenQueue | None:
        row = db.execute("SELECT id, tag, name FROM queues WHERE name = ?", (self.name,)).fetchone()
        return None if row is None else OpenQueue(db, *row)

    def _new_queue(self, db: sqlite3.Connection) -> OpenQueue:
        tag = secrets.token_hex(8)
        db.execute("INSERT INTO queues (name, tag) VALUES (?, ?)", (self.name, tag))
        return OpenQueue(db, db.execute("SELECT last_insert_rowid()").fetchone()[0], tag, self.name)


# -- what is sent ----------------------------------------------------------------------------------


def _parts(message: Sendable, place: int) -> tuple[bytes, str | None, int]:
    """Returns a message's body, attributes as JSON, and delay in microseconds.

    :param place: Its place among those sent, for errors.
    :raises ProducerError: If one of them is not what it must be.
    """
    attributes: Any = None
    delay: Any = 0.0
    body: Any = message
    try:
        if isinstance(message, tuple):
            if len(message) not in (2, 3):
                raise _bad("a body, (body, attributes) or (body, attributes, delay)", message)
            body, attributes, delay = (*message, 0.0)[:3]
        if delay and not (isinstance(delay, (int, float)) and 0 <= delay < leases.MAX_DELAY):
            raise _bad("a delay in seconds of at least 0", delay)
        return _body(body), _attributes(attributes), leases.micros_of(delay or 0.0)
    except ValueError as error:
        raise ProducerError(f"message {place} was not sent: {error}") from None


def _body(body: Any) -> bytes:
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"its text cannot be encoded as UTF-8: {error}") from None
    elif not isinstance(body, (bytes, bytearray, memoryview)):
        raise _bad("a body of bytes or text", body)
    encoded = bytes(body)
    if len(encoded) > MAX_BODY:
        raise ValueError(
            f"its body has {len(encoded)} bytes, and a row holds at most {MAX_BODY}: store it"
            " elsewhere, and send its address"
        )
    return encoded


def _attributes(attributes: Any) -> str | None:
    if attributes is not None and not isinstance(attributes, Mapping):
        raise _bad("attributes in a mapping", attributes)
    try:
        return json.dumps(dict(attributes), allow_nan=False) if attributes else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"its attributes are no JSON: {error}") from None


def _bad(rule: str, value: object) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ValueError(f"expected {rule}, got: {shown}")
