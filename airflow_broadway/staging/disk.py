"""A staging root that is a folder of a disk.

For durability see :mod:`airflow_broadway.core.formats.files`.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import (
    TEMPORARY,
    check_regular_file,
    create_file,
    drop_file,
    make_folder,
    new_file,
    note_file,
    replace_file,
    sync_file,
    sync_folder,
)
from airflow_broadway.staging.errors import SETTING, cannot

#: Bytes copied at a time.
_BLOCK = 1024 * 1024


class DiskSink:
    """A file being written under its final name; see
    :class:`airflow_broadway.staging.store.Sink`.
    """

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
    """A local or mounted folder."""

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
                    f"the staging folder {self._uri} cannot be created, since {root.parent} does"
                    f" not exist; mount or create it, or set {SETTING} to a folder that exists"
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
        check_regular_file(path, self._root)
        with _missing_file(), open(path, "rb") as file:
            return file.read()

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, path: str, until: str | None = None) -> list[str]:
        try:
            return sorted(name for name in os.listdir(path) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def modified(self, path: str) -> float | None:
        return os.stat(path).st_mtime

    def create(self, path: str, chunks: Iterable[bytes]) -> bool:
        self._make_folder(os.path.dirname(path))
        return create_file(path, chunks)

    def create_own(self, path: str, chunks: Iterable[bytes]) -> None:
        self.create(path, chunks)

    def replace(self, path: str, data: bytes) -> None:
        self._make_folder(os.path.dirname(path))
        replace_file(path, (data,))

    def note(self, path: str, data: bytes) -> None:
        self._make_folder(os.path.dirname(path))
        note_file(path, data)

    def sink(self, path: str) -> DiskSink:
        self._make_folder(os.path.dirname(path))
        return DiskSink(path)

    def source(self, path: str) -> IO[bytes]:
        check_regular_file(path, self._root)
        with _missing_file():
            return open(path, "rb")

    def copy(self, path: str, target: str) -> None:
        check_regular_file(path, self._root)
        folder = os.path.dirname(target)
        self._make_folder(folder)
        try:
            os.link(path, target)
            sync_folder(folder)
        except FileExistsError:
            return
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            with open(path, "rb") as old:
                self.create(target, iter(lambda: old.read(_BLOCK), b""))

    def remove(self, *paths: str) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                os.remove(path)

    def remove_temporary(self, path: str, before: float, *, below: bool) -> None:
        for folder, folders, names in os.walk(path):
            for name in names:
                if name.startswith(TEMPORARY):
                    with suppress(FileNotFoundError):  # its writer is alive and has finished it
                        place = os.path.join(folder, name)
                        if os.stat(place).st_mtime < before:
                            os.remove(place)
            if not below:
                folders.clear()

    def remove_tree(self, path: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def _make_folder(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        if len(folder) <= len(self._root):  # never recreates the root of an unmounted disk
            self.prepare()
            return
        self._make_folder(os.path.dirname(folder))
        try:
            make_folder(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", folder) from None


@contextmanager
def _missing_file() -> Iterator[None]:
    """Treats a path below a file as a missing file."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args, error.filename) from None
