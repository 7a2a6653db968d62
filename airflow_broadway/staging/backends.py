"""How bytes get to disk, or into a bucket, whole or not at all.

Two backends behind one protocol.  :class:`Disk` writes a temporary file, forces it to disk, and
gives it its name by a hard link (which fails if the name is taken) or by renaming; then it forces
the folder.  :class:`Bucket` leans on what object stores promise: an upload appears whole, and a
conditional put (``If-None-Match: *``) appears only if there was none.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

from fsspec.spec import AbstractBufferedFile

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import (
    create_file,
    drop_file,
    make_folder,
    new_file,
    put_new,
    replace_file,
    sync_file,
    sync_folder,
)
from airflow_broadway.staging.errors import SETTING, cannot

__all__ = ["Backend", "Bucket", "Disk", "Sink", "text_lines"]

#: Bytes that an upload holds in memory at a time; S3 takes 10,000 parts, so 80 GiB in a file.
PART = 8 * 1024 * 1024
_COPY = 1024 * 1024


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

    def create(self, path: str, chunks: Iterable[bytes]) -> bool:
        """Write a whole, durable file unless it exists; whether it was written."""
        ...

    def create_own(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file that nobody else writes: streamed, durable, all or nothing."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a whole, durable file, replacing any."""
        ...

    def sink(self, path: str) -> Sink:
        """Open a new file for writing."""
        ...

    def source(self, path: str) -> IO[bytes]:
        """Open a file for reading in any order."""
        ...

    def remove(self, path: str) -> None: ...
    def remove_tree(self, path: str) -> None: ...


# --------------------------------------------------------------------------------------------------
# Disk
# --------------------------------------------------------------------------------------------------


class _DiskSink:
    def __init__(self, path: str) -> None:
        self._path = path
        self.file: IO[bytes] = new_file(path)

    def commit(self) -> None:
        sync_file(self.file)
        self.file.close()
        sync_folder(os.path.dirname(self._path))

    def abort(self) -> None:
        if not self.file.closed:
            drop_file(self.file, self._path)


class Disk:
    """A folder of this machine, or one mounted there."""

    def __init__(self, root: str, uri: str) -> None:
        self._root = root
        self._uri = uri

    def prepare(self) -> None:
        root = Path(self._root)
        try:
            mode = root.stat().st_mode
        except FileNotFoundError:
            if not root.parent.is_dir():
                raise StagingError(
                    f"the staging folder {self._uri} cannot be made, for {root.parent} does not"
                    f" exist; mount or create it, or set {SETTING} to a folder that exists"
                ) from None
            try:
                with suppress(FileExistsError):
                    make_folder(self._root)
            except OSError as error:
                raise cannot("make it a folder", self._uri, error) from error
        except OSError as error:
            raise cannot("look", self._uri, error) from error
        else:
            if not stat.S_ISDIR(mode):
                raise StagingError(
                    f"the staging folder {self._uri} is a file; set {SETTING} to a folder"
                )

    def read(self, path: str) -> bytes:
        with _no_such_file(), open(path, "rb") as file:
            return file.read()

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(path) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def create(self, path: str, chunks: Iterable[bytes]) -> bool:
        self._make_folder(os.path.dirname(path))
        return create_file(path, chunks)

    def create_own(self, path: str, chunks: Iterable[bytes]) -> None:
        if not self.create(path, chunks):
            raise FileExistsError(errno.EEXIST, "written by another", path)

    def replace(self, path: str, data: bytes) -> None:
        self._make_folder(os.path.dirname(path))
        replace_file(path, (data,))

    def sink(self, path: str) -> Sink:
        self._make_folder(os.path.dirname(path))
        return _DiskSink(path)

    def source(self, path: str) -> IO[bytes]:
        with _no_such_file():
            return open(path, "rb")

    def remove(self, path: str) -> None:
        with _missing_ok():
            os.remove(path)

    def remove_tree(self, path: str) -> None:
        with _missing_ok():
            shutil.rmtree(path)

    def _make_folder(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        if len(folder) <= len(self._root):  # gone since: an unmounted disk is not made anew
            self.prepare()
            return
        self._make_folder(os.path.dirname(folder))
        try:
            make_folder(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", folder) from None


@contextmanager
def _no_such_file() -> Iterator[None]:
    """What lies below a file, where a folder should be, is not there."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args, error.filename) from None


@contextmanager
def _missing_ok() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass


# --------------------------------------------------------------------------------------------------
# Bucket
# --------------------------------------------------------------------------------------------------


class _BucketSink:
    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file: Any = fs.open(path, "wb", block_size=PART)
        self._done = False

    @property
    def file(self) -> IO[bytes]:
        file: IO[bytes] = self._file
        return file

    def commit(self) -> None:
        self._file.close()
        self._done = True

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        if isinstance(self._file, AbstractBufferedFile):
            # Closed first: else the file, when it is collected, uploads what it has after all.
            self._file.closed = True
            self._file.discard()
        else:
            with _missing_ok():
                self._fs.rm_file(self._path)


class Bucket:
    """An object store, through fsspec."""

    def __init__(self, fs: Any, root: str, uri: str) -> None:
        self._fs = fs
        self._root = root
        self._uri = uri

    def prepare(self) -> None:
        """Nothing: an object store has no folders."""

    def read(self, path: str) -> bytes:
        data: bytes = self._fs.cat_file(path, **self._at_once)
        return data

    @cached_property
    def _at_once(self) -> dict[str, int]:
        """What keeps s3fs from asking for a file's size before it reads it, to read it in parts."""
        parameters = inspect.signature(self._fs.cat_file).parameters
        return {"max_concurrency": 1} if "max_concurrency" in parameters else {}

    def exists(self, path: str) -> bool:
        self._forget(path)
        found: bool = self._fs.exists(path)
        return found

    def list(self, path: str) -> list[str]:
        self._forget(path)
        try:
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = {name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != path}
        return sorted(name for name in names if not name.startswith("."))

    def create(self, path: str, chunks: Iterable[bytes]) -> bool:
        data = b"".join(chunks)
        try:
            return put_new(self._fs, path, data)
        except TypeError as error:
            raise StagingError(
                f"the client of the staging folder {self._uri} cannot write exactly once"
                f" ({type(self._fs).__module__}: {error}); install a newer one"
            ) from error

    def create_own(self, path: str, chunks: Iterable[bytes]) -> None:
        sink = self.sink(path)
        try:
            sink.file.writelines(chunks)
            sink.commit()
        finally:
            sink.abort()

    def replace(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data)

    def sink(self, path: str) -> Sink:
        return _BucketSink(self._fs, path)

    def source(self, path: str) -> IO[bytes]:
        self._forget(path)
        # Parquet reads whole columns of a row group and joins near reads itself.
        file: IO[bytes] = self._fs.open(path, "rb", cache_type="none")
        return file

    def remove(self, path: str) -> None:
        with _missing_ok():
            self._fs.rm_file(path)
        self._forget(path)

    def remove_tree(self, path: str) -> None:
        with _missing_ok():
            self._fs.rm(path, recursive=True)
        self._forget(path)

    def _forget(self, path: str) -> None:
        """Look anew: the client keeps listings, and other processes write."""
        self._fs.invalidate_cache(path)
        self._fs.invalidate_cache(path.rpartition("/")[0])


def text_lines(file: IO[bytes]) -> Iterator[str]:
    """The lines of a file of UTF-8 text, each without the newline that ends it."""
    raw: Any = file  # fsspec's files read byte by byte unless something keeps a buffer
    with raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _COPY) as lines:
        for line in lines:
            yield line.decode("utf-8").removesuffix("\n")
