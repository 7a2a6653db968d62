"""The staging root, and folders below it.

A :class:`Store` is one root: a folder of a disk (``file://``) or of a bucket (``s3://`` and other
schemes of fsspec).  A :class:`Folder` is one folder below it, and implements
:class:`airflow_broadway.core.formats.files.Files`.

The first writer creates ``.broadway-root.json`` in the root.  Manifests and plans include the id in
it.  So a task that sees *another* disk under the same path raises an error instead of finding an
empty folder.
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
from typing import IO, Any

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import check_path
from airflow_broadway.core.formats.store_clock import store_clock
from airflow_broadway.staging.bucket import Bucket, BucketSink
from airflow_broadway.staging.disk import Disk, DiskSink
from airflow_broadway.staging.errors import SETTING, cannot, translated

#: The file that identifies a root.
ROOT_FILE = ".broadway-root.json"
#: A file whose modification time is the root's clock.
CLOCK_FILE = ".broadway-clock.json"
#: Schemes of Azure's stores.
_AZURE = ("abfs", "abfss", "adl", "az")
#: Files that :meth:`Folder.read_all` reads concurrently.
READERS = 16
#: Bytes read at a time from a file that is read line by line.
_BUFFER = 1024 * 1024


def host_name() -> str:
    """Returns this machine's name, for display."""
    return socket.gethostname()


#: A file being written; it counts once its ``commit`` has returned.
Sink = DiskSink | BucketSink


class Store:
    """One staging root.

    :param fs: An fsspec file system.
    :param root: The root's path in the format of ``fs``.
    :param uri: The root as configured; its URI for Spark has no ``conn_id@``.
    """

    def __init__(self, fs: Any, root: str, uri: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/") or "/"
        self.uri = uri.rstrip("/")
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        #: Whether it is a folder of the local file system.
        self.local = "file" in protocols
        self.backend: Disk | Bucket = (
            Disk(self.root, self.uri) if self.local else Bucket(fs, self.uri)
        )
        self._root_id: str | None = None

    @classmethod
    def open(cls, uri: str, **storage_options: Any) -> Store:
        """Opens a root by its URI, e.g. ``"s3://bucket/staging"``.

        :param storage_options: Options of the fsspec client.
        :raises StagingError: If fsspec has no client for it, or a path is not absolute.
        """
        from fsspec.core import url_to_fs

        if "://" not in uri and not Path(uri).is_absolute():
            raise StagingError(
                f"the staging folder {uri!r} is not an absolute path; set {SETTING} to one that"
                " every worker and the Spark driver can access"
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
        """Returns the root's id, which is created at first use.

        :raises StagingError: If the root is not writable or not a folder, or its parent is missing.
        """
        if self._root_id is None:
            self._root_id = self._read_root_id()
        return self._root_id

    def check_root(self, root_id: str, host: str) -> None:
        """Rejects files written under another root.

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
        """Rejects references (results of tasks in XCom) that name another root.

        :raises StagingError: Like :meth:`check_root`.
        """
        for reference in references:
            if "root_id" in reference:  # a dry run, and a task without messages, stage nothing
                self.check_root(reference["root_id"], reference["host"])

    def _read_root_id(self) -> str:
        text = self._read_root_file()
        try:
            return str(json.loads(text)["id"])
        except (ValueError, KeyError, TypeError):
            raise StagingError(
                f"{self.uri}/{ROOT_FILE} is not a file of airflow-broadway; set {SETTING} to a"
                " folder of its own"
            ) from None

    def _read_root_file(self) -> bytes:
        """Reads the root's file; creates it if there is none."""
        path = f"{self.root}/{ROOT_FILE}"
        with translated("use a file", self.uri):
            self.backend.prepare()
            with suppress(FileNotFoundError):
                return self.backend.read(path)
            identity = {
                "version": 1,
                "id": uuid.uuid4().hex,
                "host": host_name(),
                "created_at": SystemClock().now().isoformat(),
            }
            try:
                if isinstance(self.backend, Bucket):
                    self.backend.check_exclusive(f"{self.root}/.broadway-probe-{uuid.uuid4().hex}")
                self.backend.create(path, (json.dumps(identity).encode(),))
                return self.backend.read(path)  # of two concurrent writers one wins
            except FileNotFoundError as error:
                raise cannot("write a file", self.uri, error) from error

    def clock(self, lease: float, host: Clock, *, report: bool = True) -> Clock:
        """Returns the clock by which to judge a lease; see
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
        """Returns the URI of ``path`` for Spark's own file systems."""
        scheme, mark, location = self.uri.partition("://")
        if self.local:
            base = f"file://{self.root}"
        elif not mark:
            base = self.uri
        else:
            authority, slash, tail = location.partition("/")
            if scheme in ("s3", "s3a", "s3n"):
                scheme, authority = "s3a", authority.rpartition("@")[2]
            elif scheme in ("gs", "gcs"):
                scheme, authority = "gs", authority.rpartition("@")[2]
            elif scheme in _AZURE and "." not in authority.rpartition("@")[2]:
                authority = authority.rpartition("@")[2]  # not container@account.dfs…
            base = f"{scheme}://{authority}{slash}{tail}"
        return f"{base}/{path}" if path else base

    def folder(self, path: str) -> Folder:
        """Returns a folder below the root, which need not exist."""
        return Folder(self, path)


class Folder:
    """One folder below a root; see :class:`airflow_broadway.core.formats.files.Files`.

    :param path: Relative to the root.
    :raises StagingError: From every method, for any error of the file system; only reading a
        missing file raises ``FileNotFoundError``.
    """

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self._backend = store.backend

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store.uri!r}, {self.path!r})"

    def full(self, path: str) -> str:
        """Returns the path in the format of the store's file system.

        :raises StagingError: If it leads out of the folder, since paths may come from files.
        """
        checked = check_path(path, f"{self.store.uri}/{self.path}")
        return "/".join(part for part in (self.store.root, self.path, checked) if part)

    def spark_uri(self, path: str = "") -> str:
        """Returns the URI of ``path`` for Spark."""
        return self.store.spark_uri(f"{self.path}/{path}" if path else self.path)

    def read(self, path: str) -> str:
        with translated(f"read {path}", self.store.uri):
            return self._backend.read(self.full(path)).decode("utf-8")

    def read_all(self, paths: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Reads whole files, :data:`READERS` concurrently; yields (path, text) in the same order.

        The text is ``None`` for a missing file.
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
                if len(ahead) >= 2 * READERS:  # bounds memory
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def exists(self, path: str) -> bool:
        with translated(f"look for {path}", self.store.uri):
            return self._backend.exists(self.full(path))

    def list(self, folder: str, until: str | None = None) -> list[str]:
        """Lists a folder's names, sorted.

        :param until: Names after this one may be omitted, which saves requests to a bucket.
        """
        with translated(f"list {folder}", self.store.uri):
            return self._backend.list(self.full(folder), until)

    def modified(self, path: str) -> float | None:
        with translated(f"look at {path}", self.store.uri):
            return self._backend.modified(self.full(path))

    def create(self, path: str, text: str) -> bool:
        with self._writing(path):
            return self._backend.create(self.full(path), (text.encode("utf-8"),))

    def create_own(self, path: str, chunks: Iterable[bytes]) -> None:
        """Writes a file with a single writer: streamed, durable, all or nothing."""
        with self._writing(path):
            self._backend.create_own(self.full(path), chunks)

    def replace(self, path: str, text: str) -> None:
        with self._writing(path):
            self._backend.replace(self.full(path), text.encode("utf-8"))

    def note(self, path: str, text: str) -> None:
        """Writes a whole file, replacing any, which survives a crash of this process but perhaps
        not of the host.

        On a disk it costs no sync.
        """
        with self._writing(path):
            self._backend.note(self.full(path), text.encode("utf-8"))

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        count = 0
        with self._writing(path), _commit_at_end(self.sink(path)) as file:
            for line in lines:
                file.write(line.encode("utf-8") + b"\n")
                count += 1
        return count

    def lines(self, path: str) -> Iterator[str]:
        with translated(f"read {path}", self.store.uri):
            yield from _iter_lines(self._backend.source(self.full(path)))

    def sink(self, path: str) -> Sink:
        """Opens a new file for writing; it counts once committed."""
        with self._writing(path):
            return self._backend.sink(self.full(path))

    def source(self, path: str) -> IO[bytes]:
        """Opens a file for random access."""
        with translated(f"read {path}", self.store.uri):
            return self._backend.source(self.full(path))

    def copy(self, path: str, folder: Folder, target: str) -> None:
        """Copies or links a file to another folder of this root.

        :raises FileNotFoundError: If it does not exist.
        """
        with translated(f"copy {path}", self.store.uri):
            self._backend.copy(self.full(path), folder.full(target))

    def remove(self, *paths: str) -> None:
        """Removes those of these files that exist, in any order."""
        with translated(f"remove {', '.join(paths)}", self.store.uri):
            self._backend.remove(*map(self.full, paths))

    def remove_temporary(self, folder: str, before: datetime, *, below: bool = False) -> None:
        """Removes temporary files of dead writers that were last written before a timestamp.

        :param below: Whether to include the folders below.
        """
        with translated(f"remove temporary files of {folder}", self.store.uri):
            self._backend.remove_temporary(self.full(folder), before.timestamp(), below=below)

    def remove_all(self) -> None:
        """Removes the folder and its content."""
        if not self.path:
            raise StagingError("the staging root itself must not be removed")
        with translated(f"remove {self.path}", self.store.uri):
            self._backend.remove_tree(self.full(""))

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        """Ensures the root and translates errors, including missing files."""
        self.store.root_id()
        try:
            with translated(f"write {path}", self.store.uri):
                yield
        except (FileNotFoundError, FileExistsError) as error:
            raise cannot(f"write {path}", self.store.uri, error) from error


@contextmanager
def _commit_at_end(sink: Sink) -> Iterator[IO[bytes]]:
    """Commits a new file at the end of the block, or discards it on an exception."""
    try:
        yield sink.file
        sink.commit()
    finally:
        sink.abort()


def _iter_lines(file: IO[bytes]) -> Iterator[str]:
    """Yields the lines of a UTF-8 file without their newlines."""
    raw: Any = file  # fsspec's files read byte by byte without a buffer
    with raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _BUFFER) as lines:
        for line in lines:
            yield line.decode("utf-8").removesuffix("\n")
