"""The embedded queue: named queues of messages in one SQLite file.

A message is *ready*, *delayed* (ready later), *leased* to one generation, or *dead*.  A lease ends
when it is settled or released, or when the next receive detects that its deadline has passed.  An
ended lease cannot change anything.  Until a receive has ended it, a lease past its deadline can
still be renewed and settled, because no other generation has its messages.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, Moved
from airflow_broadway.core.custody.protocol import Entry, Lease, QueueDepth, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.sqlite import leases
from airflow_broadway.producers.sqlite.database import (
    Database,
    OpenQueue,
    from_micros,
    ranges,
    to_micros,
    transaction,
)

if TYPE_CHECKING:
    from typing import Self

#: The kind of its leases.
KIND: Final = "sqlite"
#: Message ids per second above which they run ahead of the clock.
_IDS_PER_SECOND = 1 << 20

#: The maximum bytes of one body: SQLite's row limit minus space for attributes.
MAX_BODY = 999_000_000

#: A message to send: a body, a body and its attributes, or these and a delay in seconds.
Body = bytes | bytearray | memoryview | str
Sendable = (
    Body | tuple[Body, Mapping[str, Any] | None] | tuple[Body, Mapping[str, Any] | None, float]
)


#: Bytes of bodies after which a receive returns fewer messages than its demand.
MAX_RECEIVE_BYTES = 64 * 1024 * 1024

# Values that another program wrote may have any type, so bodies are cast to BLOB.
_READY: Final = """SELECT m.id, CAST(b.body AS BLOB), CAST(b.attributes AS BLOB), m.enqueued_at,
    m.attempt, m.deliveries
    FROM messages m LEFT JOIN bodies b ON b.id = m.id
    WHERE m.queue = ? AND m.lease IS NULL AND m.ready_at <= ?
    AND (m.giver IS NULL OR m.giver IS NOT ?)
    ORDER BY m.ready_at, m.enqueued_at, m.id LIMIT ?"""
_ANY_READY: Final = """SELECT EXISTS (SELECT 1 FROM messages WHERE queue = :queue AND lease IS NULL
    AND ready_at <= :now AND (giver IS NULL OR giver IS NOT :lease))
    OR EXISTS (SELECT 1 FROM leases WHERE queue = :queue AND state = 'open' AND deadline <= :now
    AND id IS NOT :lease)"""
_FREE: Final = """SELECT COUNT(*), COALESCE(SUM(ready_at <= :now), 0),
    MIN(CASE WHEN ready_at <= :now THEN enqueued_at END)
    FROM messages WHERE queue = :queue AND lease IS NULL"""
_LEASED: Final = """SELECT COUNT(*), COALESCE(SUM(deadline <= :now), 0),
    MIN(CASE WHEN deadline <= :now THEN enqueued_at END)
    FROM leases JOIN messages ON lease = leases.id
    WHERE leases.queue = :queue AND state = 'open'"""
_DEAD: Final = "SELECT COUNT(*) FROM dead WHERE queue = :queue"
#: The dead letters of a :class:`Choice`.
_CHOSEN: Final = """queue = :queue AND instr(reason, :reason) > 0
    AND (:stage = '' OR stage = :stage) AND died_at >= COALESCE(:since, died_at)
    AND (:until IS NULL OR died_at < :until)
    AND (:rows IS NULL OR id IN (SELECT value FROM json_each(:rows)))"""
_LETTERS: Final = f"""SELECT died_at, id, reason, stage, attempt, enqueued_at, generation,
    CAST(body AS BLOB), CAST(attributes AS BLOB) FROM dead LEFT JOIN bodies USING (id)
    WHERE {_CHOSEN} AND (died_at, id) > (:died_at, :id) ORDER BY died_at, id LIMIT 100"""
_REQUEUE: Final = f"""INSERT INTO messages (id, queue, enqueued_at, ready_at, deliveries)
    SELECT id, queue, enqueued_at, :now, deliveries FROM dead WHERE {_CHOSEN}"""
_DELETE: Final = f"DELETE FROM bodies WHERE id IN (SELECT id FROM dead WHERE {_CHOSEN})"


class LeaseRecord(NamedTuple):
    """The queue's record of an open or ended lease.

    :param state: ``"open"``, ``"settled"``, ``"released"`` or ``"lapsed"``.
    :param received: The total number of messages received under it.
    :param held: The number of messages that it currently holds.
    :param report: Its report, without the actions of ``settle_now``; ``None`` while it is open.
    """

    lease: Lease
    state: str
    received: int
    held: int
    report: SettleReport | None


class SqliteQueue:
    """One named queue; safe to share between threads, and its file between processes.

    The first call opens the file, and the first :meth:`send` creates a missing one; until then the
    queue is empty.  Every call is one transaction, which is on disk when the call returns.

    :param path: The file; its folder must exist, on a disk of this machine.
    :param name: The queue's name; several queues may share a file.
    :param busy_timeout: Seconds to wait for another process's write.
    :raises ProducerError: From every method, if the file cannot be used; with path and remedy.
    :raises ProducerUnavailable: The same, if a retry may help: the file is locked, the disk full.
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
        """The file as an absolute path."""
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
        """Creates the file and the queue if they are missing, as the first :meth:`send` does."""
        with self._open_or_create():
            pass

    def send(self, messages: Iterable[Sendable]) -> list[str]:
        """Enqueues all of ``messages``, or none; returns their ids.

        The messages are collected in memory first: send a stream in batches of some thousands.

        :raises ProducerError: If a body is neither bytes nor text, or too large, or attributes are
            not a JSON object; it names the message.
        """
        now = self._now()
        states: list[tuple[int, int]] = []
        bodies: list[tuple[str | None, bytes]] = []
        plain = (now, now)
        for index, message in enumerate(messages):
            if type(message) is bytes and len(message) <= MAX_BODY:
                states.append(plain)
                bodies.append((None, message))
                continue
            body, attributes, delay = _parts(message, index)
            states.append((now, now + delay))
            bodies.append((attributes, body))
        if not bodies:
            return []
        with self._open_or_create() as queue:
            # Ids grow with the clock, so that a file restored from a backup does not reuse ids
            # that the lost file assigned after the backup.
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
            # With a single writer and AUTOINCREMENT the ids have no gap.
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

        One call returns at most 64 MiB of bodies beyond its first message, and no message that this
        generation has released.  It ends leases past their deadline.

        :param position: The ``position`` of the first message; it increases by one per message.
        :raises LeaseLapsed: If the generation's lease has ended.
        """
        at = self._clock.now()
        now = to_micros(at)
        with self._open_existing() as queue:
            if queue is None or demand < 1:
                return []
            # Polling an empty queue takes no lock and writes nothing.
            lease = leases.open_lease(queue, generation)
            parameters = {"queue": queue.id, "now": now, "lease": lease}
            if not queue.db.execute(_ANY_READY, parameters).fetchone()[0]:
                return []
            with transaction(queue.db):
                lease = leases.open_lease(queue, generation)
                leases.end_lapsed(queue, now, spared=lease)
                while True:
                    rows, size = [], 0
                    for row in queue.db.execute(_READY, (queue.id, now, lease, demand)):
                        rows.append(row)
                        size += len(row[1] or b"")
                        if size >= MAX_RECEIVE_BYTES:
                            break
                    # Converted before the commit: after an error here, messages stay in the queue.
                    messages, unread = leases.messages_of(queue, generation, rows, position, at)
                    leases.set_aside(queue, unread, generation, now)
                    if messages or not rows:
                        break
                if messages:
                    lease = lease or leases.new_lease(queue, generation, now, owner or {}, seconds)
                    queue.db.execute(
                        "UPDATE leases SET received = received + ?, deadline = max(deadline, ?)"
                        " WHERE id = ?",
                        (len(messages), now + leases.micros_of(seconds), lease),
                    )
                    queue.db.executemany(
                        f"UPDATE messages SET lease = {lease:d}, deliveries = deliveries + 1"
                        " WHERE id BETWEEN ? AND ?",
                        ranges([row[0] for row in rows if row[0] not in unread]),
                    )
                return messages

    # -------------------------------------------------------------------------------- the lease

    def renew(self, generation: str, seconds: float) -> datetime | None:
        """Extends the lease to ``seconds`` from now; returns its deadline, ``None`` if it ended."""
        now = self._clock.now()
        deadline = to_micros(now) + leases.micros_of(seconds)
        with self._open_existing() as queue:
            if queue is None:
                return None
            with transaction(queue.db):
                updated = queue.db.execute(
                    "UPDATE leases SET deadline = ?"
                    " WHERE queue = ? AND generation = ? AND state = 'open'",
                    (deadline, queue.id, generation),
                ).rowcount
        return from_micros(deadline) if updated else None

    def holds(self, generation: str) -> bool:
        """Returns whether the lease is open and its deadline has not passed."""
        with self._open_existing() as queue:
            if queue is None:
                return False
            rows = queue.db.execute(
                "SELECT 1 FROM leases WHERE queue = ? AND generation = ? AND state = 'open'"
                " AND deadline > ?",
                (queue.id, generation, self._now()),
            )
            return rows.fetchone() is not None

    def settle(
        self, generation: str, settlement: Settlement, *, state: str = "settled"
    ) -> SettleReport:
        """Carries out all verdicts on messages of the generation, and ends its lease.

        The report is stored: settling again changes nothing and returns it.  It does not include
        messages settled early by :meth:`settle_now`.

        :raises ProducerError: If the lease holds messages that are neither in ``expected`` nor in
            ``everything``, or a verdict names an id of another queue; nothing is changed then.
        """
        now = self._now()
        with self._open_existing() as queue:
            if queue is None:
                named = sum(1 for _ in settlement.entries())
                return SettleReport(lapsed=max(named, settlement.expected or 0))
            return leases.settle(queue, generation, settlement, now, state=state)

    def settle_now(self, generation: str, entries: Iterable[Entry]) -> SettleReport:
        """Carries out ``entries``, and keeps the lease for the other messages; idempotent."""
        with self._open_existing() as queue:
            if queue is None:
                ids = frozenset(entry.message_id for entry in entries)
                return SettleReport(lapsed=len(ids), undone=ids)
            return leases.settle_now(queue, generation, entries, self._now())

    def release(self, generation: str) -> SettleReport:
        """Releases all messages of the generation immediately, and ends its lease."""
        return self.settle(generation, Settlement(rest=RELEASE), state="released")

    # ------------------------------------------------------------------------------ inspecting

    def depth(self) -> QueueDepth:
        """Returns the queue's depth; messages of a lapsed lease count as ready."""
        now = self._now()
        with self._open_existing() as queue:
            if queue is None:
                return QueueDepth(0, 0, 0, 0, None)
            with transaction(queue.db, "DEFERRED"):
                values = {"queue": queue.id, "now": now}
                free, ready, oldest = queue.db.execute(_FREE, values).fetchone()
                held, lapsed, oldest_lapsed = queue.db.execute(_LEASED, values).fetchone()
                [dead] = queue.db.execute(_DEAD, values).fetchone()
        timestamps = [timestamp for timestamp in (oldest, oldest_lapsed) if timestamp is not None]
        age = max(0.0, (now - min(timestamps)) / 1_000_000) if timestamps else None
        return QueueDepth(ready + lapsed, free - ready, held - lapsed, dead, age)

    def leases(self, *, ended: bool = False) -> list[LeaseRecord]:
        """Lists the open leases, oldest first; with ``ended`` also the recorded ended ones."""
        with self._open_existing() as queue:
            if queue is None:
                return []
            rows = queue.db.execute(
                "SELECT generation, owner, seconds, deadline, state, received,"
                " (SELECT COUNT(*) FROM messages WHERE lease = leases.id), report"
                " FROM leases WHERE queue = ? AND (? OR state = 'open') ORDER BY id",
                (queue.id, ended),
            ).fetchall()
        place = {"path": self.path, "queue": self.name}
        return [
            LeaseRecord(
                Lease(
                    kind=KIND,
                    generation=generation,
                    seconds=seconds,
                    deadline=from_micros(deadline),
                    owner=_owner(owner),
                    state=place,
                ),
                state,
                received,
                held,
                None if report is None else SettleReport.from_json(json.loads(report)),
            )
            for generation, owner, seconds, deadline, state, received, held, report in rows
        ]

    def names(self) -> list[str] | None:
        """Returns the names of all queues in the file, sorted; ``None`` if there is no file."""
        with self._database.open(create=False) as db:
            if db is None:
                return None
            return sorted(row[0] for row in db.execute("SELECT name FROM queues"))

    def check(self, *, receives: bool = True) -> None:
        """Checks that file and queue exist, since a path or name may be mistyped.

        :param receives: Whether a run is to receive from the queue.
        :raises ProducerError: If there is no such file or queue, or the file cannot be used.
        """
        names = self.names()
        if names is not None and self.name in names:
            return
        rule = cure = ""
        if receives:
            rule = ", and a run receives only from a queue that exists"
            cure = (
                ", send to the queue, or create it with `airflow-broadway queue create --path"
                f" {quote(self.path)} --queue {quote(self.name)}`"
            )
        if names is None:
            raise ProducerError(f"there is no queue file {self.path}{rule}: correct the path{cure}")
        raise ProducerError(
            f"the queue file {self.path} has no queue {self.name!r}; it has {names}: correct the"
            f" name{cure}"
        )

    # ----------------------------------------------------------------------------- dead letters

    @property
    def place(self) -> str:
        """A description of the queue for messages."""
        place = f"queue {self.name!r} in {self.path}"
        exists = self.name in (self.names() or ())
        return place if exists else f"{place}, to which nothing was sent yet"

    def count(self) -> int:
        """Counts the dead letters."""
        return self.depth().dead

    def dead_letters(self, *, limit: int | None = 100, choice: Choice = EVERY) -> list[DeadLetter]:
        """Returns dead letters as a list, oldest first.

        :param limit: The maximum number to return; ``None`` for all.
        """
        return list(islice(self.letters(choice), limit))

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        """Yields dead letters, oldest first, in batches of one query each."""
        with self._open_existing() as queue:
            if queue is None:
                return
            values = {**_values(queue, choice), "died_at": -1, "id": -1}
            while rows := queue.db.execute(_LETTERS, values).fetchall():
                values["died_at"], values["id"] = rows[-1][:2]
                for died_at, row, reason, stage, attempt, sent_at, owner, body, raw in rows:
                    key = queue.id_of(row)
                    yield DeadLetter(
                        message_id=key,
                        body=body or b"",
                        properties=_properties(raw),
                        reason=reason,
                        stage=stage,
                        attempt=attempt,
                        enqueued_at=_timestamp(sent_at),
                        died_at=_timestamp(died_at),
                        generation=owner,
                        origin=self.name,
                        original_id=key,
                    )

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        """Requeues dead letters with their original ids, on their first attempt.

        :raises ProducerError: If ``to`` is another queue, or this queue does not exist.
        """
        if to not in (None, self.name):
            raise ProducerError(
                f"the dead letters of the embedded queue {self.name!r} lie in its own file"
                f" and go back to it, not to {to!r}: leave --to out"
            )
        return self._move(choice, _REQUEUE)

    def delete(self, choice: Choice = EVERY) -> Moved:
        """Deletes dead letters permanently.

        :raises ProducerError: If the queue does not exist.
        """
        return self._move(choice, _DELETE)

    def _move(self, choice: Choice, statement: str) -> Moved:
        """Executes a statement on the selected dead letters, and removes them from the table."""
        self.check(receives=False)
        with self._open_or_create() as queue:
            values = _values(queue, choice)
            rows = queue.db.execute(f"SELECT id FROM dead WHERE {_CHOSEN}", values).fetchall()
            queue.db.execute(statement, values | {"now": self._now()})
            queue.db.execute(f"DELETE FROM dead WHERE {_CHOSEN}", values)
        unknown = set(choice.ids or ()) - {queue.id_of(row) for (row,) in rows}
        return Moved(len(rows), tuple(sorted(unknown)))

    # -------------------------------------------------------------------------------- the rest

    @contextmanager
    def _open_existing(self) -> Iterator[OpenQueue | None]:
        """Opens the queue; yields ``None`` if it does not exist yet."""
        with self._database.open(create=False) as db:
            yield None if db is None else self._queue(db)

    @contextmanager
    def _open_or_create(self) -> Iterator[OpenQueue]:
        """Opens the queue in one transaction, and creates it if it is missing."""
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
        inserted = db.execute("INSERT INTO queues (name, tag) VALUES (?, ?)", (self.name, tag))
        return OpenQueue(db, inserted.lastrowid or 0, tag, self.name)


# -- reading ---------------------------------------------------------------------------------------


def _values(queue: OpenQueue, choice: Choice) -> dict[str, Any]:
    """Returns the SQL parameters that select dead letters."""
    rows = None if choice.ids is None else [queue.row_of(key) for key in choice.ids]
    return {
        "queue": queue.id,
        "reason": choice.reason,
        "stage": choice.stage,
        "since": choice.since and to_micros(choice.since),
        "until": choice.until and to_micros(choice.until),
        "rows": None if rows is None else json.dumps(rows),
    }


def _owner(text: Any) -> dict[str, Any]:
    """Parses the owner of a lease; empty if it is malformed."""
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError, RecursionError):
        return {}


def _properties(raw: bytes | None) -> dict[str, Any]:
    """Parses the attributes of a dead letter; tolerates malformed ones."""
    try:
        value = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        return {"unreadable": (raw or b"").decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"attributes": value}


def _timestamp(micros: int) -> datetime:
    """Converts a timestamp; the epoch if it is out of range."""
    try:
        return from_micros(micros)
    except OverflowError:
        return from_micros(0)


# -- sending ---------------------------------------------------------------------------------------


def _parts(message: Sendable, index: int) -> tuple[bytes, str | None, int]:
    """Returns a message's body, attributes as JSON, and delay in microseconds.

    :param index: The index of the message, for errors.
    :raises ProducerError: If one of them is invalid.
    """
    body: Any
    attributes: Any
    delay: Any
    try:
        if not isinstance(message, tuple):
            message = (message, None)
        elif len(message) not in (2, 3):
            raise _invalid("a body, (body, attributes) or (body, attributes, delay)", message)
        body, attributes, delay = (*message, 0.0)[:3]
        if delay and not (isinstance(delay, (int, float)) and 0 <= delay < leases.MAX_DELAY):
            raise _invalid("a delay in seconds of at least 0", delay)
        if not isinstance(body, (str, bytes, bytearray, memoryview)):
            raise _invalid("a body of bytes or text", body)
        encoded = body.encode() if isinstance(body, str) else bytes(body)
        if len(encoded) > MAX_BODY:
            raise ValueError(
                f"its body has {len(encoded)} bytes, and a row holds at most {MAX_BODY}: store it"
                " elsewhere, and send its address"
            )
        return encoded, _attributes(attributes), leases.micros_of(delay or 0.0)
    except UnicodeEncodeError as error:
        reason = f"its text cannot be encoded as UTF-8: {error}"
    except ValueError as error:
        reason = str(error)
    raise ProducerError(f"message {index} was not sent: {reason}") from None


def _attributes(attributes: Any) -> str | None:
    if attributes is not None and not isinstance(attributes, Mapping):
        raise _invalid("attributes in a mapping", attributes)
    try:
        return json.dumps(dict(attributes), allow_nan=False) if attributes else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"its attributes are no JSON: {error}") from None


def _invalid(rule: str, value: object) -> ValueError:
    excerpt = repr(value)
    excerpt = excerpt if len(excerpt) <= 80 else excerpt[:77] + "..."
    return ValueError(f"expected {rule}, got: {excerpt}")
