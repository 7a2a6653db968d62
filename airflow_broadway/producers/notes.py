"""Small files of a producer's own, below the pipeline's staging folder.

They are read by other processes, so each is whole or absent: durable when :meth:`Notes.write`
returns.  Without a staging folder there are none, and a producer keeps what it needs in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import Any

from airflow_broadway.core.errors import StagingError

__all__ = ["Notes", "digest"]


def digest(text: str) -> str:
    """A short hash, fit for names."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Notes:
    """A folder of small JSON files, and of files of bytes beside them.

    :param staging: The pipeline's folder, as a URI.
    :param folder: Below it; names of safe characters.
    """

    def __init__(self, staging: str, folder: str) -> None:
        self._fs, root = _file_system(staging)
        self._root = f"{root.rstrip('/')}/{folder}"
        self._local = _is_local(self._fs)

    def read(self, name: str) -> Any:
        """The JSON value of a file; ``None`` if there is none.

        :raises StagingError: If it cannot be read.
        """
        try:
            return json.loads(self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StagingError(f"{self._root}/{name} cannot be read: {error}") from None

    def write(self, name: str, value: Any) -> None:
        """Write a whole file, replacing any.

        :raises StagingError: If it cannot be written.
        """
        self.put(name, json.dumps(value, separators=(",", ":")).encode())

    def put(self, name: str, data: bytes) -> str:
        """Write a file of bytes, replacing any; its path, for :meth:`get`.

        :raises StagingError: If it cannot be written.
        """
        path = f"{self._root}/{name}"
        try:
            if self._local:
                _write_locally(path, data)
            else:  # an object appears whole or not at all
                self._fs.pipe_file(path, data)
        except OSError as error:
            raise StagingError(f"{path} cannot be written: {error}") from None
        return path

    def get(self, path: str) -> bytes:
        """Read a file that :meth:`put` wrote.

        :raises StagingError: If it cannot be read.
        """
        try:
            return bytes(self._fs.cat_file(path))
        except OSError as error:
            raise StagingError(f"{path} cannot be read: {error}") from None

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder, sorted; none if there is no such folder."""
        where = f"{self._root}/{folder}".rstrip("/")
        try:
            if not self._local:
                self._fs.invalidate_cache(where)
            paths = self._fs.ls(where, detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StagingError(f"{where} cannot be listed: {error}") from None
        found = sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)
        return [name for name in found if not name.endswith(".tmp")]

    def exists(self, name: str) -> bool:
        """Whether there is such a file, as of now."""
        path = f"{self._root}/{name}"
        if not self._local:
            self._fs.invalidate_cache(path.rpartition("/")[0])
        return bool(self._fs.exists(path))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it.  Safe to repeat."""
        try:
            self._fs.rm(f"{self._root}/{name}", recursive=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StagingError(f"{self._root}/{name} cannot be removed: {error}") from None


def _write_locally(path: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    draft = f"{path}.{uuid.uuid4().hex}.tmp"
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_local(fs: Any) -> bool:
    protocol = fs.protocol if isinstance(fs.protocol, (list, tuple)) else (fs.protocol,)
    return "file" in protocol or "local" in protocol


def _file_system(uri: str) -> tuple[Any, str]:
    """The file system of a folder's URI, and its path there."""
    if "@" in uri.partition("://")[2].partition("/")[0]:  # s3://connection@bucket: Airflow's
        from airflow.sdk import ObjectStoragePath

        path = ObjectStoragePath(uri)
        return path.fs, path.path
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(uri)
    return fs, str(root)
