"""The staging root, and folders below it.

A :class:`Store` is one root: a folder of a disk (``file://``) or of a bucket (``s3://`` and what
else fsspec knows).  A :class:`Folder` is one folder below it, and implements
:class:`airflow_broadway.core.formats.files.Files`.

Whoever writes first puts ``.broadway-root.json`` into the root.  The id in it goes into manifests
and plans.  So a task that sees *another* disk under the same path raises an error instead of
finding nothing.
"""

from __future__ import annotations

import io
import json
import socket
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import check_path
from airflow_broadway.core.formats.store_clock import store_clock
from airflow_broadway.staging.bucket import Bucket
from airflow_broadway.staging.disk import Disk
from airflow_broadway.staging.errors import SETTING, cannot, translated

#: The file that tells one root from another.
ROOT_FILE = ".broadway-root.json"
#: A file whose modification time tells the root's clock.
CLOCK_FILE = ".broadway-clock.json"
#: Files that :meth:`Folder.read_all` reads at a time.
READERS = 16
#: Bytes that are read at a time where a file is read line by line.
_BUFFER = 1024 * 1024


def host_name() -> str:
    """This machine's name, for people."""
    return socket.gethostname()


class Sink(Protocol):
    """A file being written; it counts once :meth:`commit` has returned."""

    @property
    def file(self) -> IO[bytes]:
        """What to write to."""
        ...

    def commit(self) -> None:
        """Make it durable."""
        ...

    def abort(self) -> None:
        """Leave nothing of it, as far as possible; safe after :meth:`commit`."""
        ...


class Backend(Protocol):
    """What a store needs of a file system; paths are absolute, in the file system's own form."""

    def prepare(self) -> None:
        """Make sure that the root is there and a folder."""
        ...

    def read(self, path: str) -> bytes:
        """The whole file; ``FileNotFoundError`` if there is none."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """The names in a folder, sorted, without hidden ones; empty if there is no such folder."""
        ...

    def modified(self, path: str) -> float | None:
        """The modification time, by the file system's clock; ``None`` where it has none."""
        ...

    def create(self, path: str, chunks: Iterable[bytes]) -> bool:
        """Write a whole, durable file unless it exists; whether it was written."""
        ...

    def create_own(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file that nobody else writes: streamed, durable, all or nothing."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a whole, durable file, replacing any."""
        ...

    def note(self, path: str, data: bytes) -> None:
        """Write a whole file, replacing any, which need not outlive the host."""
        ...

    def sink(self, path: str) -> Sink:
        """Open a new file for writing."""
        ...

    def source(self, path: str) -> IO[bytes]:
        """Open a file for reading in any order."""
        ...

    def copy(self, path: str, target: str) -> None:
        """Have a file under another name too, durably; a link to it where there are links.

        ``FileNotFoundError`` if it is not there; one that has the name already stays.
        """
        ...

    def remove(self, path: str) -> None: ...
    def remove_tree(self, path: str) -> None: ...

    def remove_temporary(self, path: str, before: float, *, below: bool) -> None:
        """Remove temporary files of a folder, and of those below it, last written before an instant
        (seconds since 1970): whoever wrote them died.
        """
        ...


class Store:
    """One staging root.

    :param fs: An fsspec file system.
    :param root: The root's path, as ``fs`` wants it.
    :param uri: The root as the user wrote it; Spark's address of it has no ``conn_id@``.
    """

    def __init__(self, fs: Any, root: str, uri: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/") or "/"
        self.uri = uri.rstrip("/")
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        #: Whether it is a folder of this machine's file system.
        self.local = "file" in protocols
        self.backend: Backend = Disk(self.root, self.uri) if self.local else Bucket(fs, self.uri)
        self._root_id: str | None = None

    @classmethod
    def open(cls, uri: str, **storage_options: Any) -> Store:
        """Open a root by its address alone, e.g. ``"s3://bucket/staging"``.

        :raises StagingError: If fsspec has no client for it, or it is a path that is not absolute.
        """
        from fsspec.core import url_to_fs

        if "://" not in uri and not Path(uri).is_absolute():
            raise StagingError(
                f"the staging folder {uri!r} is no absolute path; set {SETTING} to one that every"
                " worker and the Spark driver see"
            )
        try:
            fs, root = url_to_fs(uri, **storage_options)
        except (ImportError, ValueError) as error:
            raise StagingError(f"cannot open the staging folder {uri}: {error}") from error
        return cls(fs, root, uri)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    # -- identity ------------------------------------------------------------------------------

    def root_id(self) -> str:
        """The root's id; made at first use.

        :raises StagingError: If the root cannot be written, is no folder, or its parent is missing.
        """
        if self._root_id is None:
            self._root_id = self._read_root_id()
        return self._root_id

    def check_root(self, root_id: str, host: str) -> None:
        """Refuse what was written under another root.

        :param root_id: The root's id in a manifest, plan or reference.
        :param host: The host that wrote it.
        :raises StagingError: Naming both hosts and the setting.
        """
        own = self.root_id()
        if own == root_id:
            return
        raise StagingError(
            f"files written on host {host!r} lie under another staging root (id {root_id}) than the"
            f" one that host {host_name()!r} sees at {self.uri} (id {own}): set {SETTING} to a"
            " folder that every worker and the Spark driver share, such as a mounted disk or"
            " s3://bucket/folder"
        )

    def check_roots(self, references: Iterable[Mapping[str, Any]]) -> None:
        """Refuse references, the results of tasks in XCom, that name another root.

        :raises StagingError: As :meth:`check_root`.
        """
        for reference in references:
            if "root_id" in reference:  # a dry run, and a task without messages, stage nothing
                self.check_root(reference["root_id"], reference["host"])

    def _read_root_id(self) -> str:
        text = self._root_file()
        try:
            return str(json.loads(text)["id"])
        except (ValueError, KeyError, TypeError):
            raise StagingError(
                f"{self.uri}/{ROOT_FILE} is no file of airflow-broadway; set {SETTING} to a folder"
                " of its own"
            ) from None

    def _root_file(self) -> bytes:
        """What the root's file says; it is made if there is none."""
        path = f"{self.root}/{ROOT_FILE}"
        with translated("use a file", self.uri):
            self.backend.prepare()
            with suppress(FileNotFoundError):
                return self.backend.read(path)
            made = {
                "version": 1,
                "id": uuid.uuid4().hex,
                "host": host_name(),
                "created_at": SystemClock().now().isoformat(),
            }
            try:
                self.backend.create(path, (json.dumps(made).encode(),))
                return self.backend.read(path)  # of two that are made at once, one stands
            except FileNotFoundError as error:
                raise cannot("write a file", self.uri, error) from error

    def clock(self, lease: float, host: Clock, *, report: bool = True) -> Clock:
        """Return the clock by which to judge a lease; see
        :func:`airflow_broadway.core.formats.store_clock.store_clock`.
        """
        root = self.folder("")
        return store_clock(
            root,
            CLOCK_FILE,
            lambda: root.replace(CLOCK_FILE, '{"version": 1}'),
            lease,
            host,
            place=self.uri,
            report=report,
        )

    # -- addresses -----------------------------------------------------------------------------

    def spark_uri(self, path: str = "") -> str:
        """The address by which Spark's own file systems find ``path``."""
        scheme, mark, rest = self.uri.partition("://")
        if self.local:
            base = f"file://{self.root}"
        elif not mark:
            base = self.uri
        else:
            authority, slash, tail = rest.partition("/")
            if scheme in ("s3", "s3a", "s3n"):
                scheme, authority = "s3a", authority.rpartition("@")[2]
            elif scheme in ("gs", "gcs"):
                scheme, authority = "gs", authority.rpartition("@")[2]
            base = f"{scheme}://{authority}{slash}{tail}"
        return f"{base}/{path}" if path else base

    def folder(self, path: str) -> Folder:
        """A folder below the root; it need not be there."""
        return Folder(self, path)


class Folder:
    """One folder below a root; see :class:`airflow_broadway.core.formats.files.Files`.

    :param path: Relative to the root.
    :raises StagingError: From every method, for whatever the file system raises; only reading a
        file that is not there raises ``FileNotFoundError``.
    """

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self._backend = store.backend

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store.uri!r}, {self.path!r})"

    def full(self, path: str) -> str:
        """The path as the store's file system wants it.

        :raises StagingError: If it leads out of the folder: paths come from files too.
        """
        checked = check_path(path, f"{self.store.uri}/{self.path}")
        return "/".join(part for part in (self.store.root, self.path, checked) if part)

    def spark_uri(self, path: str = "") -> str:
        """The address by which Spark finds ``path``."""
        return self.store.spark_uri(f"{self.path}/{path}" if path else self.path)

    def read(self, path: str) -> str:
        with translated(f"read {path}", self.store.uri):
            return self._backend.read(self.full(path)).decode("utf-8")

    def read_all(self, paths: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Read whole files, :data:`READERS` at a time; yields (path, text) in the given order.

        The text is ``None`` for a file that is not there.
        """

        def read(path: str) -> tuple[str, str | None]:
            try:
                return path, self.read(path)
            except FileNotFoundError:
                return path, None

        if len(paths) < 2:
            yield from map(read, paths)
            return
        with ThreadPoolExecutor(min(READERS, len(paths)), "broadway-read") as pool:
            ahead: deque[Future[tuple[str, str | None]]] = deque()
            for path in paths:
                ahead.append(pool.submit(read, path))
                if len(ahead) >= 2 * READERS:  # memory holds so many, and not all of them
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def exists(self, path: str) -> bool:
        with translated(f"look for {path}", self.store.uri):
            return self._backend.exists(self.full(path))

    def list(self, folder: str) -> list[str]:
        with translated(f"list {folder}", self.store.uri):
            return self._backend.list(self.full(folder))

    def modified(self, path: str) -> float | None:
        with translated(f"look at {path}", self.store.uri):
            return self._backend.modified(self.full(path))

    def create(self, path: str, text: str) -> bool:
        with self._writing(path):
            return self._backend.create(self.full(path), (text.encode("utf-8"),))

    def create_own(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file that nobody else writes: streamed, durable, all or nothing."""
        with self._writing(path):
            self._backend.create_own(self.full(path), chunks)

    def replace(self, path: str, text: str) -> None:
        with self._writing(path):
            self._backend.replace(self.full(path), text.encode("utf-8"))

    def note(self, path: str, text: str) -> None:
        """Write a whole file, replacing any, which outlives this process, and perhaps not the host.

        On a disk it costs no sync.
        """
        with self._writing(path):
            self._backend.note(self.full(path), text.encode("utf-8"))

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        count = 0
        with self._writing(path), _committed(self.sink(path)) as file:
            for line in lines:
                file.write(line.encode("utf-8") + b"\n")
                count += 1
        return count

    def lines(self, path: str) -> Iterator[str]:
        with translated(f"read {path}", self.store.uri):
            yield from _text_lines(self._backend.source(self.full(path)))

    def sink(self, path: str) -> Sink:
        """Open a new file for writing; it counts once committed."""
        with self._writing(path):
            return self._backend.sink(self.full(path))

    def source(self, path: str) -> IO[bytes]:
        """Open a file for reading in any order."""
        with translated(f"read {path}", self.store.uri):
            return self._backend.source(self.full(path))

    def copy(self, path: str, folder: Folder, target: str) -> None:
        """Have a file in another folder of this root too.

        :raises FileNotFoundError: If it is not there.
        """
        with translated(f"copy {path}", self.store.uri):
            self._backend.copy(self.full(path), folder.full(target))

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with translated(f"remove {path}", self.store.uri):
            self._backend.remove(self.full(path))

    def remove_temporary(self, folder: str, before: datetime, *, below: bool = False) -> None:
        """Remove what the dead were writing in a folder before an instant.

        :param below: In the folders below it, too.
        """
        with translated(f"remove temporary files of {folder}", self.store.uri):
            path = self.full(folder)
            self._backend.remove_temporary(path, before.timestamp(), below=below)

    def remove_all(self) -> None:
        """Remove the folder and all in it."""
        if not self.path:
            raise StagingError("the staging root itself is not removed")
        with translated(f"remove {self.path}", self.store.uri):
            self._backend.remove_tree(self.full(""))

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        """Make sure of the root, and translate errors: whoever writes expects no missing file."""
        self.store.root_id()
        try:
            with translated(f"write {path}", self.store.uri):
                yield
        except (FileNotFoundError, FileExistsError) as error:
            raise cannot(f"write {path}", self.store.uri, error) from error


@contextmanager
def _committed(sink: Sink) -> Iterator[IO[bytes]]:
    """A new file, committed at the end of the block, and dropped by an exception."""
    try:
        yield sink.file
        sink.commit()
    finally:
        sink.abort()


def _text_lines(file: IO[bytes]) -> Iterator[str]:
    """The lines of a file of UTF-8 text, each without the newline that ends it."""
    raw: Any = file  # fsspec's files read byte by byte unless something keeps a buffer
    with raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _BUFFER) as lines:
        for line in lines:
            yield line.decode("utf-8").removesuffix("\n")
