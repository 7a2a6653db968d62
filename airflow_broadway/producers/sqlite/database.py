"""Opens the SQLite file of the embedded queue, creates its tables, and translates its errors.

Every commit is on disk when it returns (WAL, ``synchronous=FULL``).  Every write transaction takes
the write lock at its start (``BEGIN IMMEDIATE``), so that none fails later because of the lock.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.formats.files import new_file

#: The version of the tables below, kept in the file's ``user_version``.
SCHEMA_VERSION = 1

#: Identifies the file by its ``application_id``: "Brdw".
APPLICATION_ID = 0x42726477

#: Bytes to which the write-ahead log is truncated after a large transaction.
WAL_LIMIT = 64 * 1024 * 1024

# Timestamps are integers: microseconds since the epoch.  A message's state and its body are rows of
# two tables, so that leasing, retrying and dead-lettering never copy a body.
_SCHEMA = """
CREATE TABLE queues (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    tag TEXT NOT NULL                  -- first half of its messages' ids; random
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice: second half of the message id
    queue INTEGER NOT NULL,
    enqueued_at INTEGER NOT NULL,
    ready_at INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    deliveries INTEGER NOT NULL DEFAULT 0,
    lease INTEGER,                     -- which lease holds it
    giver INTEGER                      -- which lease released it last
);
INSERT INTO sqlite_sequence (name, seq) VALUES ('messages', 0);
CREATE INDEX messages_ready ON messages (queue, ready_at, enqueued_at) WHERE lease IS NULL;
CREATE INDEX messages_leased ON messages (lease) WHERE lease IS NOT NULL;
CREATE TABLE bodies (
    id INTEGER PRIMARY KEY,            -- of a message, live or dead
    attributes TEXT,                   -- JSON, or NULL if there are none
    body BLOB NOT NULL
);
CREATE TABLE leases (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    generation TEXT NOT NULL,
    owner TEXT NOT NULL,               -- JSON
    seconds REAL NOT NULL,
    deadline INTEGER NOT NULL,
    opened_at INTEGER NOT NULL,
    received INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'open',    -- open, settled, released, lapsed
    ended_at INTEGER,
    report TEXT,                       -- JSON, once ended
    UNIQUE (queue, generation)
);
CREATE INDEX leases_open ON leases (queue, deadline) WHERE state = 'open';
CREATE INDEX leases_ended ON leases (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE settled (                 -- messages settled before their lease was
    lease INTEGER NOT NULL,
    message INTEGER NOT NULL,
    action INTEGER NOT NULL,
    PRIMARY KEY (lease, message)
) WITHOUT ROWID;
CREATE TABLE dead (
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    enqueued_at INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    deliveries INTEGER NOT NULL,
    stage TEXT NOT NULL,
    reason TEXT NOT NULL,
    died_at INTEGER NOT NULL,
    generation TEXT NOT NULL
);
CREATE INDEX dead_letters ON dead (queue, died_at);
"""

#: Connections inherited through a fork.  SQLite forbids the child to use or close them, so they are
#: referenced here and never garbage-collected.
_INHERITED: list[object] = []

#: SQLite's error codes (https://sqlite.org/rescode.html).
_PERM, _BUSY, _LOCKED, _READONLY, _IOERR = 3, 5, 6, 8, 10
_CORRUPT, _FULL, _CANTOPEN, _NOTADB = 11, 13, 14, 26

#: Error code → error text.
_TEXTS: Final = {
    _BUSY: "the queue file {path} has been locked by another process for"
    " {seconds:g} s: try again, or end the process that holds it",
    _FULL: "no room is left on the disk of the queue file {path}: free some; the"
    " queue is unchanged",
    _IOERR: "the disk of the queue file {path} fails: {error}; the queue is unchanged",
    _CANTOPEN: "the queue file {path} cannot be written ({error}): let this user"
    " write both the file and its folder {path.parent}",
    _NOTADB: "the file {path} is not a database: correct the path, or move the file away",
    _CORRUPT: "the queue file {path} is damaged ({error}): save a copy, then recover"
    " it with the `.recover` command of the sqlite3 program",
}
#: Error codes with the same text as others.
_SAME: Final = {
    _LOCKED: _BUSY,
    _READONLY: _CANTOPEN,
    _PERM: _CANTOPEN,
}
#: Error codes after which a retry may help.
_PASSING: Final = (_BUSY, _FULL, _IOERR)


class Database:
    """One SQLite file; safe to share between threads and across forks.

    Each thread of each process has its own connection.  A file that was deleted or replaced is
    reopened, so that no write goes to an unlinked file.

    :param path: The file; its folder must exist.
    :param busy_timeout: Seconds to wait for another process's write before failing.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 30.0) -> None:
        # Symbolic links are not resolved, so that a changed link is detected.
        self.path = Path(path).expanduser().absolute()
        self.busy_timeout = busy_timeout
        self._pid = os.getpid()
        #: Thread → its connection, and the status of the opened file.
        self._opened: dict[int, tuple[sqlite3.Connection, os.stat_result]] = {}

    def close(self) -> None:
        """Closes the connections of all threads of this process; the next use opens new ones."""
        self._forget_parent()
        while self._opened:
            self._opened.popitem()[1][0].close()

    @contextmanager
    def open(self, *, create: bool) -> Iterator[sqlite3.Connection | None]:
        """Yields this thread's connection, and translates SQLite errors.

        :param create: Whether to create a missing file; otherwise the connection is ``None``.
        """
        try:
            yield self._connection(create)
        except sqlite3.Error as error:
            raise self._translated(error, _primary(error)) from error

    def _connection(self, create: bool) -> sqlite3.Connection | None:
        self._forget_parent()
        thread = threading.get_ident()
        opened = self._opened.get(thread)
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            status = None
        except OSError as error:
            raise ProducerError(f"the queue file {self.path} cannot be reached: {error}") from error
        if opened is not None:
            connection, file = opened
            if status is not None and os.path.samestat(status, file):
                return connection
            del self._opened[thread]
            connection.close()
        if status is None:
            folder = self.path.parent
            if not folder.is_dir():
                raise ProducerError(
                    f"the queue file {self.path} cannot be opened: the folder {folder} does not"
                    " exist; make it, or correct the path"
                )
            if not create:
                return None
            self._make_file()
        if self.path.is_dir():
            raise ProducerError(
                f"the queue file {self.path} is a folder: name a file in it, such as"
                f" {self.path / 'queue.db'}"
            )
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode=rw",
            uri=True,
            timeout=self.busy_timeout,
            isolation_level=None,  # transactions are written out
            check_same_thread=False,  # close() is called from any thread
        )
        try:
            self._prepare(connection)
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            connection.close()
            raise
        self._opened[thread] = connection, os.stat(self.path)
        return connection

    def _forget_parent(self) -> None:
        if self._pid != os.getpid():
            _INHERITED.append(self._opened)
            self._opened = {}
            self._pid = os.getpid()

    def _make_file(self) -> None:
        """Creates an empty file; SQLite creates the WAL files with the same mode."""
        try:
            new_file(os.path.realpath(self.path)).close()
        except FileExistsError:  # another process was faster
            pass
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            code = _FULL if full else _CANTOPEN
            raise self._translated(error, code) from error

    def _translated(self, error: Exception, code: int) -> ProducerError:
        code = _SAME.get(code, code)
        kind = ProducerUnavailable if code in _PASSING else ProducerError
        text = _TEXTS.get(
            code, f"the queue file {{path}} refused: {type(error).__name__}: {{error}}"
        )
        return kind(text.format(path=self.path, error=error, seconds=self.busy_timeout))

    def _prepare(self, db: sqlite3.Connection) -> None:
        # The application id is read last: another process may create the tables meanwhile.
        tables = _tables(db)
        [version] = db.execute("PRAGMA user_version").fetchone()
        [application] = db.execute("PRAGMA application_id").fetchone()
        if version > SCHEMA_VERSION and application == APPLICATION_ID:
            raise ProducerError(
                f"the queue file {self.path} has schema {version}, written by a newer"
                f" airflow-broadway; this one knows schema {SCHEMA_VERSION}: upgrade it here"
            )
        if application != APPLICATION_ID and (version or tables):
            raise ProducerError(
                f"the file {self.path} is another application's database: give the queue a file of"
                " its own"
            )
        self._use_wal(db)
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT}")
        if version == 0:
            self._make_tables(db)

    def _use_wal(self, db: sqlite3.Connection) -> None:
        # Enabling WAL needs an exclusive lock, for which SQLite does not wait by itself.
        limit = time.monotonic() + self.busy_timeout
        while True:
            try:
                mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:
                if _primary(error) != _BUSY or time.monotonic() > limit:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise ProducerError(
                f"the queue file {self.path} cannot use a write-ahead log (journal mode {mode!r}):"
                " put it on a local disk; network file systems do not serve"
            )

    def _make_tables(self, db: sqlite3.Connection) -> None:
        with transaction(db):
            if _tables(db):  # another process was faster
                return
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Runs a ``with`` block in a transaction; an exception rolls it back.

    :param kind: ``"IMMEDIATE"`` takes the write lock at the start; ``"DEFERRED"`` reads a snapshot.
    """
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
        if db.in_transaction:  # SQLite itself rolls back on some errors
            db.execute("ROLLBACK")
        raise


def _primary(error: sqlite3.Error) -> int:
    """Returns the primary error code; 0 if SQLite did not set one."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _tables(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


# -- rows ------------------------------------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(timestamp: datetime) -> int:
    """Converts a timestamp to microseconds since the epoch."""
    return (timestamp - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """Converts microseconds since the epoch to a timestamp."""
    return _EPOCH + timedelta(microseconds=micros)


#: A message id: the tag of its queue, and its row id without leading zeros.
_ID: Final = re.compile(r"(.*)-([1-9][0-9]{0,17})", re.DOTALL)


class OpenQueue(NamedTuple):
    """A queue in an open file: its row id, the tag of its message ids, and its name."""

    db: sqlite3.Connection
    id: int
    tag: str
    name: str

    def id_of(self, row: int) -> str:
        """Returns the message id of a row."""
        return f"{self.tag}-{row}"

    def row_of(self, message_id: str) -> int | None:
        """Returns the row of a message id; ``None`` if it belongs to another queue."""
        match = _ID.fullmatch(message_id)
        return int(match[2]) if match is not None and match[1] == self.tag else None


def ranges(rows: list[int]) -> list[tuple[int, int]]:
    """Returns distinct row ids as closed ranges in ascending order."""
    rows.sort()
    if rows and rows[-1] - rows[0] == len(rows) - 1:
        return [(rows[0], rows[-1])]
    closed: list[tuple[int, int]] = []
    for row in rows:
        if closed and row == closed[-1][1] + 1:
            closed[-1] = (closed[-1][0], row)
        else:
            closed.append((row, row))
    return closed
