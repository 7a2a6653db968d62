"""The files of a run: the protocol that reads and writes them, and plain files on a disk.

Also what every implementation goes by: which paths it takes, and who may read what it makes on a
disk.  Runs on the Spark driver too.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from airflow_broadway.core.errors import StagingError

__all__ = [
    "Files",
    "LocalFiles",
    "check_path",
    "make_folder",
    "make_folders",
    "modes_below",
    "new_file",
    "put_new",
]


class Files(Protocol):
    """Reads and writes small files of one run; implemented over fsspec, Hadoop and plain files.

    Paths are relative to the run's folder.
    """

    def read(self, path: str) -> str:
        """The file's text.

        :raises FileNotFoundError: If there is none.
        """
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if there is no such folder."""
        ...

    def create(self, path: str, text: str) -> bool:
        """Write a whole file unless it exists, durable, all or nothing; whether it did."""
        ...

    def replace(self, path: str, text: str) -> None:
        """Write a whole file, replacing any: durable and all or nothing."""
        ...

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        """Write a new file of lines, streamed; how many.  Publish its name only afterwards."""
        ...

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a file, streamed."""
        ...


def check_path(path: str, folder: str) -> str:
    """Return ``path`` if it lies below ``folder``: paths come from files, and files from anybody.

    :raises StagingError: If it is absolute, or leads out of the folder.
    """
    if path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/"):
        raise StagingError(f"{path!r} is no path below {folder}")
    return path


def modes_below(folder: str) -> tuple[int, int]:
    """The modes of folders and files that are made in ``folder``.

    Nobody but their user may read them; in a folder with the set-group-ID bit (``chmod 2770``) the
    folder's group may read and write them too.
    """
    if os.stat(folder).st_mode & stat.S_ISGID:
        return 0o2770, 0o660
    return 0o700, 0o600


def make_folder(path: str) -> None:
    """Make one folder, whatever the umask, in its parent.

    :raises FileExistsError: If it is there.
    """
    mode, _ = modes_below(os.path.dirname(path) or ".")
    os.mkdir(path, 0o700)
    if mode != 0o700:
        os.chmod(path, mode)


def make_folders(path: str) -> None:
    """Make a folder and those above it, as far as they are missing."""
    if os.path.isdir(path):
        return
    make_folders(os.path.dirname(path) or ".")
    with suppress(FileExistsError):
        make_folder(path)


def new_file(path: str) -> IO[bytes]:
    """Make a file and open it for writing bytes, whatever the umask.

    :raises FileExistsError: If it is there.
    """
    _, mode = modes_below(os.path.dirname(path) or ".")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    if mode != 0o600:
        os.fchmod(handle, mode)
    return os.fdopen(handle, "wb")


class LocalFiles:
    """Plain files below ``root``."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def read(self, path: str) -> str:
        """The file's text."""
        return self._path(path).read_text(encoding="utf-8")

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return self._path(path).exists()

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if there is no such folder."""
        try:
            return sorted(os.listdir(self._path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def create(self, path: str, text: str) -> bool:
        """Write a whole file unless it exists; whether it was written."""
        target = self._path(path)
        # A link fails if the name is taken, and names a file that is already whole and on disk.
        aside = self._aside(target, text)
        try:
            os.link(aside, target)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        _sync_folder(target.parent)
        return True

    def replace(self, path: str, text: str) -> None:
        """Write a whole file, replacing any."""
        target = self._path(path)
        os.replace(self._aside(target, text), target)
        _sync_folder(target.parent)

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        """Write a new file of lines, streamed; how many."""
        target = self._path(path)
        make_folders(str(target.parent))
        count = 0
        with new_file(str(target)) as file:
            for line in lines:
                file.write(f"{line}\n".encode())
                count += 1
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(target.parent)
        return count

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a file, streamed."""
        with self._path(path).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.rstrip("\n")

    def _path(self, path: str) -> Path:
        return self.root / check_path(path, str(self.root))

    @staticmethod
    def _aside(target: Path, text: str) -> Path:
        make_folders(str(target.parent))
        # The leading dot keeps it out of listings by Spark; other readers know their names.
        aside = target.parent / f".{target.name}.{uuid.uuid4().hex}"
        try:
            with new_file(str(aside)) as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return aside


def _sync_folder(folder: Path) -> None:
    """Make a new name in ``folder`` outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_new(fs: Any, path: str, data: bytes) -> bool:
    """Put an object into a store unless there is one: of two who do so at once, one does.

    :param fs: The store's file system, of fsspec.
    :returns: Whether it was put.
    :raises TypeError: If the store's client is too old to put so.
    """
    while True:
        try:
            fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            # Two conditional puts at the same instant: S3 may refuse one with 409.
            if not _is_conflict(error):
                raise
            fs.invalidate_cache(path.rpartition("/")[0])
            if fs.exists(path):
                return False
        else:
            return True


def _is_conflict(error: Exception) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            return code in ("ConditionalRequestConflict", "409")
        cause = cause.__cause__
    return "ConditionalRequestConflict" in str(error)
