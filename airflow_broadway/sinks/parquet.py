"""A folder of Parquet files, on a disk or in an object store, as a sink.

Layout, below the folder::

    <column>=<value>/…/<commit id>-<attempt>-<n>.parquet    rows; folders as by partition_by
    _commits/<commit id>.json                               a commit that landed, or a tombstone
    _staged/<commit id>-<attempt>/…                         files that are not visible yet

Readers skip names that begin with an underscore, as Spark, Hive, Trino and pyarrow do, so they need
to know nothing of commits.  A commit has three steps:

1. write its files below ``_staged``,
2. create ``_commits/<commit id>.json`` exclusively: from now on the commit has landed,
3. *publish* its files: link or copy each to its visible name, and remove it from ``_staged``.

If a process dies between the second and the third step, whichever process next asks whether the
commit landed publishes the files.  The messages of a batch are settled only afterwards: so all rows
of settled messages are visible, and no row is visible twice.  A tombstone is created under the same
name as a commit, so only one of them exists.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.formats.files import put_new, sync_folder
from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.options import Options, is_template, option, options
from airflow_broadway.core.model.rules import TEXT, Rule
from airflow_broadway.core.model.sink import (
    Commit,
    CommitRefused,
    Sink,
    SinkClient,
    SinkEnv,
    SinkError,
)

_COMMITS, _STAGED = "_commits", "_staged"


@options
class ParquetFolder(Options, Sink):
    """Commits each batch as Parquet files of one folder.

    Spark batchers need a folder on a disk that the driver, its executors and the workers share.
    """

    path: str = option(
        rule=TEXT,
        doc="An absolute path or a URI: ``file:///lake/orders``, or for Python batchers"
        " ``s3://lake/orders``.  Created at the first commit.",
    )
    partition_by: Any = option(
        default=(),
        rule=Rule(
            "a list of column names",
            lambda v: isinstance(v, (list, tuple)) and all(map(TEXT.holds, v)),
        ),
        doc="Columns whose values are folders, ``<column>=<value>``.",
    )
    compression: str = option(default="zstd", rule=TEXT, doc="The codec of the files.")

    def _resolve(self) -> None:
        if is_template(self.path) or "://" in self.path or os.path.isabs(self.path):
            return
        raise OptionsError("ParquetFolder.path", "an absolute path or a URI", self.path)

    @property
    def uri(self) -> str:
        """The folder's URI."""
        path = self.path.rstrip("/")
        return path if "://" in path else f"file://{path}"

    def open(self, env: SinkEnv) -> SinkClient:
        """Opens it in a process with Python alone."""
        return _PythonClient(self, _open_storage(self.uri))

    def open_spark(self, spark: Any, env: SinkEnv) -> SinkClient:
        """Opens it in a Spark driver."""
        if not self.uri.startswith("file:"):
            raise SinkError(
                f"{self.uri}: a Spark batcher writes a ParquetFolder on a shared disk only; for"
                " object stores use a table format, such as DeltaTable"
            )
        return _SparkClient(self, _open_storage(self.uri), spark)


class _Storage(Protocol):
    """The operations on a folder that commits need; paths are relative to it."""

    def create(self, path: str, data: bytes) -> bool:
        """Writes a whole file unless it exists; of several concurrent calls one succeeds."""

    def read(self, path: str) -> bytes | None:
        """Returns a file's content; ``None`` if there is none."""

    def find(self, folder: str) -> list[str]:
        """Returns the files below a folder, relative to it, sorted; none if it does not exist."""

    def sync(self, folder: str) -> None:
        """Makes the files below a folder durable."""

    def publish(self, path: str, target: str) -> None:
        """Makes a file visible as ``target``, whole, unless it is; a missing file was published."""

    def remove(self, folder: str) -> None:
        """Removes a folder with its files, if it exists."""


def _open_storage(uri: str) -> _Storage:
    if uri.startswith("file:"):
        return _Disk("/" + uri[len("file:") :].lstrip("/"))
    with _translated(uri):
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(uri)
    return _Objects(fs, path)


class _Disk:
    """A folder of a local or mounted disk.

    Files get the mode that the process's umask gives them, for other readers of the folder.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def create(self, path: str, data: bytes) -> bool:
        target = self.path_of(path)
        folder = os.path.dirname(target)
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f".tmp-{uuid.uuid4().hex}")
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            os.remove(temporary)
        sync_folder(folder)
        return True

    def read(self, path: str) -> bytes | None:
        try:
            with open(self.path_of(path), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def find(self, folder: str) -> list[str]:
        top = self.path_of(folder)
        files = (os.path.join(at, name) for at, _, names in _walk(top) for name in names)
        return sorted(os.path.relpath(file, top) for file in files)

    def sync(self, folder: str) -> None:
        os.makedirs(self.path_of(folder), exist_ok=True)  # there is none without rows
        for at, _, names in _walk(self.path_of(folder)):
            for name in names:
                handle = os.open(os.path.join(at, name), os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            sync_folder(at)
        sync_folder(os.path.dirname(self.path_of(folder)))

    def publish(self, path: str, target: str) -> None:
        visible = self.path_of(target)
        os.makedirs(os.path.dirname(visible), exist_ok=True)
        with suppress(FileExistsError, FileNotFoundError):
            os.link(self.path_of(path), visible)
        sync_folder(os.path.dirname(visible))
        with suppress(FileNotFoundError):
            os.remove(self.path_of(path))

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.path_of(folder), ignore_errors=True)

    def path_of(self, path: str) -> str:
        """Returns the path on the disk."""
        return os.path.join(self.root, path)


def _walk(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks a folder; one that does not exist, or is removed by another process, has no files.

    :raises OSError: If a folder cannot be listed; by default its files would be missing in silence.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    yield from os.walk(top, onerror=fail)


class _Objects:
    """A folder of an object store, through fsspec."""

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")

    def create(self, path: str, data: bytes) -> bool:
        return put_new(self.fs, self.path_of(path), data)

    def read(self, path: str) -> bytes | None:
        try:
            data: bytes = self.fs.cat_file(self.path_of(path))
        except FileNotFoundError:
            return None
        return data

    def find(self, folder: str) -> list[str]:
        top = self.path_of(folder)
        self.fs.invalidate_cache()
        return sorted(str(name)[len(top) + 1 :] for name in self.fs.find(top))

    def sync(self, folder: str) -> None:
        """Does nothing: an object is durable once written."""

    def publish(self, path: str, target: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.cp_file(self.path_of(path), self.path_of(target))
            self.fs.rm_file(self.path_of(path))

    def remove(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm(self.path_of(folder), recursive=True)

    def path_of(self, path: str) -> str:
        """Returns the path in the store."""
        return f"{self.root}/{path}"


class _Client(SinkClient):
    """Commits, reads and rules out; how rows are written is the subclasses' concern."""

    def __init__(self, options: ParquetFolder, storage: _Storage) -> None:
        self.options = options
        self.storage = storage

    @abstractmethod
    def _write(self, rows: Any, folder: str, name: str) -> None:
        """Writes rows as Parquet files below a folder, each file's name beginning with ``name``."""

    def commit(self, rows: Any, commit: Commit) -> None:
        name = f"{commit.commit_id}-{commit.attempt}"
        staged = f"{_STAGED}/{name}"
        try:
            with self._translated():
                self.storage.remove(staged)
                self._write(rows, staged, name)
                self.storage.sync(staged)
                files = self.storage.find(staged)
        except SinkError as error:
            # Ruling out removes files, also while they are written.
            if self.storage.read(_marker(commit.commit_id)) is not None:
                raise self._refused(commit, self._landed(commit.commit_id)) from error
            raise
        value = {"attempt": commit.attempt, "files": files}
        # Without an answer, a client may find what it wrote itself: so it is read.
        self.storage.create(_marker(commit.commit_id), json.dumps(value).encode())
        landed = self._landed(commit.commit_id)
        if landed != commit.attempt:
            self.storage.remove(staged)
            raise self._refused(commit, landed)

    def _refused(self, commit: Commit, landed: int | None) -> CommitRefused:
        return CommitRefused(
            f"the commit {commit.commit_id} to {self.options.uri} was "
            + ("ruled out" if landed is None else f"made by attempt {landed}")
        )

    def landed(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        with self._translated():
            attempts = {key: self._landed(key) for key in commit_ids}
        return {key: attempt for key, attempt in attempts.items() if attempt is not None}

    def rule_out(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        with self._translated():
            for key in commit_ids:
                self.storage.create(_marker(key), json.dumps({"attempt": None}).encode())
        landed = self.landed(commit_ids)
        with self._translated():
            for name in {file.partition("/")[0] for file in self.storage.find(_STAGED)}:
                if name.rpartition("-")[0] in commit_ids:  # of an attempt that did not land
                    self.storage.remove(f"{_STAGED}/{name}")
        return landed

    def _landed(self, commit_id: str) -> int | None:
        """Returns the attempt that has landed, once its files are visible."""
        data = self.storage.read(_marker(commit_id))
        if data is None:
            return None
        value = json.loads(data)
        attempt = value["attempt"]
        if attempt is None:
            return None
        staged = f"{_STAGED}/{commit_id}-{attempt}"
        left = set(self.storage.find(staged))
        for file in value["files"]:
            if file in left:
                self.storage.publish(f"{staged}/{file}", file)
        self.storage.remove(staged)
        return int(attempt)

    def _translated(self) -> Any:
        return _translated(self.options.uri)


class _PythonClient(_Client):
    """Writes Arrow tables."""

    def _write(self, rows: Any, folder: str, name: str) -> None:
        import pyarrow as pa
        import pyarrow.dataset as ds

        storage: Any = self.storage
        missing = [
            column for column in self.options.partition_by if column not in rows.schema.names
        ]
        if missing:
            raise SinkError(f"{self.options.uri}: the rows have no column {missing[0]!r}")
        columns = [rows.schema.field(column) for column in self.options.partition_by]
        parquet: Any = ds.ParquetFileFormat()
        ds.write_dataset(
            rows,
            storage.path_of(folder),
            format=parquet,
            file_options=parquet.make_write_options(compression=self.options.compression),
            filesystem=getattr(storage, "fs", None),
            partitioning=ds.partitioning(pa.schema(columns), flavor="hive") if columns else None,
            basename_template=f"{name}-{{i}}.parquet",
            existing_data_behavior="overwrite_or_ignore",
        )


class _SparkClient(_Client):
    """Writes DataFrames, on a disk."""

    def __init__(self, options: ParquetFolder, storage: _Storage, spark: Any) -> None:
        super().__init__(options, storage)
        self.spark = spark

    def _write(self, rows: Any, folder: str, name: str) -> None:
        storage: Any = self.storage
        path = storage.path_of(folder)
        writer = rows.write.option("compression", self.options.compression)
        if self.options.partition_by:
            writer = writer.partitionBy(*self.options.partition_by)
        writer.mode("overwrite").parquet(f"file://{path}")
        number = 0
        for file in self.storage.find(folder):
            at, base = os.path.split(os.path.join(path, file))
            if base.endswith(".parquet") and not base.startswith((".", "_")):
                os.rename(os.path.join(at, base), os.path.join(at, f"{name}-{number}.parquet"))
                number += 1
            else:  # a checksum, or Spark's mark of success
                os.remove(os.path.join(at, base))
        if not number and not rows.isEmpty():
            raise SinkError(
                f"{self.options.uri}: none of the files that Spark has written is there for the"
                " driver: use a folder on a disk that the driver, its executors and the workers"
                " share; nothing was committed"
            )


def _marker(commit_id: str) -> str:
    return f"{_COMMITS}/{commit_id}.json"


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Translates errors of the storage and of the Parquet writer."""
    try:
        yield
    except SinkError:
        raise
    except Exception as error:
        raise SinkError(f"{uri}: {reason_of(error)}") from error
