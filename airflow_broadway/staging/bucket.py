"""A staging root in an object store, through fsspec.

It relies on two guarantees of object stores: an upload is atomic, and a conditional put
(``If-None-Match: *``) fails if the object exists.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import IO, Any

from fsspec.spec import AbstractBufferedFile

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import object_exists, object_names, put_new, remove_objects
from airflow_broadway.staging.errors import SETTING

#: Bytes of an upload part, which is held in memory; S3 allows 10,000 parts, so 80 GiB per file.
PART = 8 * 1024 * 1024
#: Files below this size in bytes are read whole, with one request.
SMALL = 4 * 1024 * 1024


class BucketSink:
    """A file that is being uploaded; see :class:`airflow_broadway.staging.store.Sink`."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self.file: Any = fs.open(path, "wb", block_size=PART)
        self._done = False

    def commit(self) -> None:
        self.file.close()
        self._done = True

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        if isinstance(self.file, AbstractBufferedFile):
            # Closed first: otherwise the file would upload its buffer when garbage-collected.
            self.file.closed = True
            self.file.discard()
        else:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path)


class Bucket:
    """An object store, through fsspec."""

    def __init__(self, fs: Any, uri: str) -> None:
        self._opened = fs
        self._pid = os.getpid()
        self._uri = uri

    @property
    def _fs(self) -> Any:
        """The client; a fork opens its own, since clients have threads and connections."""
        if self._pid != os.getpid():
            fs = self._opened
            self._opened = type(fs)(*fs.storage_args, **fs.storage_options)
            self._pid = os.getpid()
        return self._opened

    def prepare(self) -> None:
        """Does nothing: an object store has no folders."""

    def check_exclusive(self, path: str) -> None:
        """Checks that the store refuses to create an object that exists.

        :param path: An object for this purpose, which is removed.
        :raises StagingError: If the store overwrites it.
        """
        self.create(path, (b"1",))
        try:
            if self.create(path, (b"2",)):
                raise StagingError(
                    f"the store of {self._uri} overwrites an object despite a condition"
                    " (`If-None-Match: *`), so two writers of a file that counts once would both"
                    " succeed: use a store with conditional writes (AWS, MinIO, Ceph since Squid,"
                    f" Cloudflare R2), or set {SETTING} to a disk that all hosts share"
                )
        finally:
            with suppress(Exception):  # a small object of that name is never read
                self.remove(path)

    def read(self, path: str) -> bytes:
        data: bytes = self._fs.cat_file(path, **self._read_options)
        return data

    @cached_property
    def _read_options(self) -> dict[str, int]:
        """Arguments that make s3fs read a file in one request, without a request for its size."""
        parameters = inspect.signature(self._fs.cat_file).parameters
        return {"max_concurrency": 1} if "max_concurrency" in parameters else {}

    def exists(self, path: str) -> bool:
        self._forget(path)
        return object_exists(self._fs, path)

    def list(self, path: str, until: str | None = None) -> list[str]:
        self._forget(path)
        try:
            names = object_names(self._fs, path, until)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith("."))

    def modified(self, path: str) -> float | None:
        self._forget(path)
        try:
            at: datetime = self._fs.modified(path)
        except NotImplementedError:
            return None
        return at.timestamp()

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

    def note(self, path: str, data: bytes) -> None:
        self.replace(path, data)

    def sink(self, path: str) -> BucketSink:
        return BucketSink(self._fs, path)

    def source(self, path: str) -> IO[bytes]:
        self._forget(path)
        head = self._read_head(path)
        if len(head) < SMALL:  # one request instead of one for the size and one per range
            return io.BytesIO(head)
        # Parquet reads whole columns of a row group and coalesces adjacent reads itself.
        file: IO[bytes] = self._fs.open(path, "rb", cache_type="none")
        return file

    def _read_head(self, path: str) -> bytes:
        try:
            head: bytes = self._fs.cat_file(path, start=0, end=SMALL)
        except OSError as error:
            if "InvalidRange" not in f"{error!r} {error.__cause__!r}":
                raise
            return b""  # an empty object has no first byte
        return head

    def copy(self, path: str, target: str) -> None:
        self._fs.cp_file(path, target)

    def remove(self, *paths: str) -> None:
        remove_objects(self._fs, paths)
        for path in paths:
            self._forget(path)

    def remove_temporary(self, path: str, before: float, *, below: bool) -> None:
        """Does nothing: an object is written atomically under its final name."""

    def remove_tree(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)
        self._forget(path)

    def _forget(self, path: str) -> None:
        """Invalidates the client's cached listings, since other processes write."""
        self._fs.invalidate_cache(path)
        self._fs.invalidate_cache(path.rpartition("/")[0])
