"""Small state files of a producer, in the pipeline's staging folder or the shared one.

Other processes read them.  So each file is complete or absent, and durable when
:meth:`StateFiles.write` returns.  Without a staging folder they are in the memory of their object.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from airflow_broadway.core.errors import BroadwayError, StagingError
from airflow_broadway.core.formats.files import (
    create_file,
    make_folders,
    put_new,
    replace_file,
)


class Damaged(StagingError):
    """A file with unexpected contents: truncated, or written by another program."""


def digest(text: str) -> str:
    """Returns a short hash for file names."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def timestamp_of(seconds: float) -> datetime:
    """Converts seconds since the epoch to a timestamp."""
    return datetime.fromtimestamp(seconds, timezone.utc)


def day_of(now: datetime, *, before: int = 0) -> str:
    """Returns the UTC day of a timestamp, minus ``before`` days, as ``YYYY-MM-DD``."""
    return (now.astimezone(timezone.utc) - timedelta(days=before)).date().isoformat()


def state_files(staging: str | None, folder: str) -> StateFiles:
    """Opens a producer's files.

    :param staging: The folder as a URI; ``None``: in memory.
    :param folder: The subfolder, e.g. ``"sqs/1f2e3d"``.
    """
    return MemoryFiles() if staging is None else StateFiles(staging, folder)


class StateFiles:
    """A folder of small JSON files.

    :param staging: The pipeline's folder or the shared one, as a URI.
    :param folder: The subfolder; names of safe characters.
    """

    #: Whether other processes can read them.
    durable = True

    def __init__(self, staging: str, folder: str) -> None:
        self._fs, root = _file_system(staging)
        self._root = f"{root.rstrip('/')}/{folder}"
        self._local = _is_local(self._fs)

    def read(self, name: str) -> Any:
        """Reads the JSON value of a file; ``None`` if there is none.

        :raises StagingError: If it cannot be read; :class:`Damaged` if it is not JSON.
        """
        path = f"{self._root}/{name}"
        with _translated(path, "read"):
            try:
                return _parsed(path, self._fs.cat_file(path))
            except FileNotFoundError:
                return None

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Reads the JSON values of files by name, concurrently if the store supports it.

        Missing files are omitted; the value of a file that is not JSON is a :class:`Damaged`.

        :raises StagingError: If one cannot be read.
        """
        paths = {f"{self._root}/{name}": name for name in names}
        with _translated(self._root, "read"):
            contents = self._fs.cat_ranges(list(paths), None, None)
        for (path, name), data in zip(paths.items(), contents, strict=True):
            if isinstance(data, FileNotFoundError):
                continue
            with _translated(path, "read"):
                if isinstance(data, BaseException):
                    raise data
            try:
                yield name, _parsed(path, data)
            except Damaged as error:
                yield name, error

    def write(self, name: str, value: Any) -> None:
        """Writes a file atomically, replacing any.

        :raises StagingError: If it cannot be written.
        """
        path, data = f"{self._root}/{name}", _encoded(value)
        with _translated(path, "written"):
            if self._local:
                make_folders(os.path.dirname(path))
                replace_file(path, (data,))
            else:  # writes to object stores are atomic
                self._fs.pipe_file(path, data)

    def create(self, name: str, value: Any) -> bool:
        """Creates a file atomically unless it exists; returns whether it was created.

        Of several concurrent processes exactly one creates it.

        :raises StagingError: If it cannot be written.
        """
        path, data = f"{self._root}/{name}", _encoded(value)
        with _translated(path, "written"):
            if self._local:
                make_folders(os.path.dirname(path))
                return create_file(path, (data,))
            return put_new(self._fs, path, data)

    def names(self, folder: str = "") -> list[str]:
        """Lists the names in a folder, sorted, without hidden ones; empty if there is no folder.

        :raises StagingError: If it cannot be listed.
        """
        where = f"{self._root}/{folder}".rstrip("/")
        with _translated(where, "listed"):
            try:
                if not self._local:
                    self._fs.invalidate_cache(where)
                paths = self._fs.ls(where, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        entries = {str(path).rstrip("/") for path in paths} - {where}  # a file lists itself
        names = sorted(path.rpartition("/")[2] for path in entries)
        return [name for name in names if not name.endswith(".tmp") and name[:1] != "."]

    def exists(self, name: str) -> bool:
        """Returns whether a file exists, bypassing caches.

        :raises StagingError: If the store cannot be read.
        """
        path = f"{self._root}/{name}"
        with _translated(path, "read"):
            self._invalidate(path)
            return bool(self._fs.exists(path))

    def remove(self, name: str) -> None:
        """Removes a file, or a folder recursively.  Safe to repeat.

        :raises StagingError: If it cannot be removed.
        """
        path = f"{self._root}/{name}"
        with _translated(path, "removed"), suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    def discard(self, names: Iterable[str]) -> None:
        """Removes files, in one request if the store supports it.  Safe to repeat.

        :raises StagingError: If they cannot be removed.
        """
        if self._local:
            for name in names:
                self.remove(name)
            return
        paths = [f"{self._root}/{name}" for name in names]
        with _translated(self._root, "removed"), suppress(FileNotFoundError):
            self._fs.rm(paths)

    def _invalidate(self, path: str) -> None:
        """Invalidates the client's cached listing, because other processes write too."""
        if not self._local:
            self._fs.invalidate_cache(path.rpartition("/")[0])


@contextmanager
def _translated(path: str, done: str) -> Iterator[None]:
    """Translates any error of a file system or its client into :class:`StagingError`.

    An unreachable object store raises errors of its client that are not ``OSError``.
    """
    try:
        yield
    except BroadwayError:
        raise
    except Exception as error:
        reason = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise StagingError(f"{path} cannot be {done}: {reason}") from None


class MemoryFiles(StateFiles):
    """State files in the memory of this object."""

    durable = False

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def read(self, name: str) -> Any:
        return json.loads(self._files[name]) if name in self._files else None

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        return ((name, self.read(name)) for name in names if name in self._files)

    def create(self, name: str, value: Any) -> bool:
        return self._files.setdefault(name, data := _encoded(value)) is data

    def write(self, name: str, value: Any) -> None:
        self._files[name] = _encoded(value)

    def names(self, folder: str = "") -> list[str]:
        below = f"{folder}/" if folder else ""
        inside = (name[len(below) :] for name in list(self._files) if name.startswith(below))
        return sorted({name.partition("/")[0] for name in inside})

    def exists(self, name: str) -> bool:
        return name in self._files

    def remove(self, name: str) -> None:
        for path in list(self._files):
            if path == name or path.startswith(f"{name}/"):
                del self._files[path]

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            self.remove(name)


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parsed(path: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def _is_local(fs: Any) -> bool:
    protocol = fs.protocol if isinstance(fs.protocol, (list, tuple)) else (fs.protocol,)
    return "file" in protocol or "local" in protocol


def _file_system(uri: str) -> tuple[Any, str]:
    """Opens the file system of a URI; returns it with the path."""
    if "@" in uri.partition("://")[2].partition("/")[0]:  # s3://connection@bucket: Airflow's
        from airflow.sdk import ObjectStoragePath

        path = ObjectStoragePath(uri)
        return path.fs, path.path
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(uri)
    return fs, str(root)
