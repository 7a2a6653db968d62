"""The small files of a run: the protocol that reads and writes them, and the one on plain files.

Below the classes are the functions that make a durable file: every room writes through them.  A
file on a disk is readable by nobody but its user, unless its folder is made for a group.  Runs on
the Spark driver too.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from airflow_broadway.core.errors import StagingError

#: The names of temporary files begin so.  No other name of ours begins with a dot, and listings
#: leave such names out: file managers and synchronizers put their own everywhere.
TEMPORARY = ".tmp-"

#: What a file system answers that cannot sync a folder, and need not.
_FOLDERS_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP)


class Files(Protocol):
    """Reads and writes small files of one run: on plain files, in a bucket, through Hadoop.

    Paths are relative to the run's folder.

    :raises StagingError: From every method, if a path leads out of the folder.
    """

    def read(self, path: str) -> str:
        """The file's text.

        :raises FileNotFoundError: If there is none.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        ...

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted, without hidden ones; empty if there is no such folder."""
        ...

    def modified(self, path: str) -> float | None:
        """The modification time of a file, by the clock of its file system: seconds since 1970.

        :returns: ``None`` where the file system has none.
        :raises FileNotFoundError: If there is no such file.
        """
        ...

    def create(self, path: str, text: str) -> bool:
        """Write a whole, durable file unless it exists; whether this call wrote it.

        Of several that do so at once, one does.
        """
        ...

    def replace(self, path: str, text: str) -> None:
        """Write a whole, durable file, replacing any."""
        ...

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        """Write a new, durable file of lines, streamed; how many.

        It may be seen half written: tell its name to others only afterwards.
        """
        ...

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a file, streamed, each without its newline.

        :raises FileNotFoundError: If there is none.
        """
        ...


def check_path(path: str, folder: str) -> str:
    """Return ``path`` if it lies below ``folder``: paths come from files, and files from anybody.

    :raises StagingError: If it is absolute, or leads out of the folder.
    """
    if path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/"):
        raise StagingError(f"{path!r} is no path below {folder}")
    return path


def check_regular_file(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> None:
    """Refuses a symbolic link out of the root, and what is no file: opening a pipe blocks.

    :raises StagingError: If ``path`` is one; a missing file is left to the caller.
    """
    place, home = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath([place, home]) != home:
        raise StagingError(f"{path} leads out of {root} by a symbolic link: remove the link")
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.stat(place).st_mode):
            raise StagingError(f"{path} is no regular file: remove it")


class LocalFiles:
    """Plain files below ``root``; see :class:`Files`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def read(self, path: str) -> str:
        check_regular_file(self._path(path), self.root)
        return self._path(path).read_text(encoding="utf-8")

    def exists(self, path: str) -> bool:
        return self._path(path).exists()

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._path(folder)) if name[0] != ".")
        except (FileNotFoundError, NotADirectoryError):
            return []

    def modified(self, path: str) -> float | None:
        return self._path(path).stat().st_mtime

    def create(self, path: str, text: str) -> bool:
        return create_file(self._place_for(path), (text.encode(),))

    def replace(self, path: str, text: str) -> None:
        replace_file(self._place_for(path), (text.encode(),))

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        count = 0
        place = self._place_for(path)
        with _written(place) as file:
            for line in lines:
                file.write(f"{line}\n".encode())
                count += 1
        sync_folder(os.path.dirname(place))
        return count

    def lines(self, path: str) -> Iterator[str]:
        check_regular_file(self._path(path), self.root)
        with self._path(path).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.rstrip("\n")

    def _path(self, path: str) -> Path:
        return self.root / check_path(path, str(self.root))

    def _place_for(self, path: str) -> str:
        place = self._path(path)
        make_folders(str(place.parent))
        return str(place)


# -- a durable file on a disk ----------------------------------------------------------------------


def create_file(path: str, chunks: Iterable[bytes]) -> bool:
    """Write a whole, durable file unless it exists; whether this call wrote it.

    :param path: In a folder that is there.
    """
    with _temporary(path, chunks) as temporary:
        try:
            # Fails if the name is taken, and names a file that is already whole and on disk.
            os.link(temporary, path)
        except FileExistsError:
            # NFS repeats a request whose answer was lost: then the name is that of our own file.
            if not _is_same_file(temporary, path):
                return False
    sync_folder(os.path.dirname(path))
    return True


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:  # removed meanwhile by whoever wrote it
        return False


def replace_file(path: str, chunks: Iterable[bytes]) -> None:
    """Write a whole, durable file, replacing any.

    :param path: In a folder that is there.
    """
    with _temporary(path, chunks) as temporary:
        os.replace(temporary, path)
    sync_folder(os.path.dirname(path))


def note_file(path: str, data: bytes) -> None:
    """Write a whole file, replacing any, which outlives this process, and perhaps not the host.

    :param path: In a folder that is there.
    """
    temporary = os.path.join(os.path.dirname(path), f"{TEMPORARY}{uuid.uuid4().hex}")
    with open(temporary, "xb") as file:
        os.fchmod(file.fileno(), _modes_below(os.path.dirname(path))[1])
        file.write(data)
    os.replace(temporary, path)


@contextmanager
def _temporary(path: str, chunks: Iterable[bytes]) -> Iterator[str]:
    """A whole file on disk, beside ``path``; gone when the context ends."""
    temporary = os.path.join(os.path.dirname(path), f"{TEMPORARY}{uuid.uuid4().hex}")
    with _written(temporary) as file:
        file.writelines(chunks)
    try:
        yield temporary
    finally:
        with suppress(FileNotFoundError):  # os.replace has given it its name
            os.remove(temporary)


@contextmanager
def _written(path: str) -> Iterator[IO[bytes]]:
    """A new file: on disk when the context ends, dropped by an exception."""
    file = new_file(path)
    try:
        yield file
        sync_file(file)
        file.close()
    except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
        drop_file(file, path)
        raise


def new_file(path: str) -> IO[bytes]:
    """Make a file and open it for writing bytes, with its folder's mode whatever the umask.

    :raises FileExistsError: If it is there.
    """
    _, mode = _modes_below(os.path.dirname(path) or ".")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    if mode != 0o600:
        os.fchmod(handle, mode)
    return os.fdopen(handle, "wb")


def drop_file(file: IO[bytes], path: str) -> None:
    """Close a file and remove it, written or not."""
    with suppress(OSError):  # a full disk fails again when the buffer is flushed
        file.close()
    with suppress(FileNotFoundError):
        os.remove(path)


def sync_file(file: IO[bytes]) -> None:
    """Make what was written to a file outlast a power cut."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Make the names in a folder outlast a power cut."""
    handle = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _FOLDERS_NOT_SYNCED:
            raise
    finally:
        os.close(handle)


def make_folders(path: str) -> None:
    """Make a folder and those above it, as far as they are missing."""
    if os.path.isdir(path):
        return
    make_folders(os.path.dirname(path) or ".")
    with suppress(FileExistsError):
        make_folder(path)


def make_folder(path: str) -> None:
    """Make one durable folder in its parent, with its parent's mode whatever the umask.

    :raises FileExistsError: If it is there.
    """
    parent = os.path.dirname(path) or "."
    mode, _ = _modes_below(parent)
    os.mkdir(path, 0o700)
    if mode != 0o700:
        os.chmod(path, mode)
    sync_folder(parent)


def _modes_below(folder: str) -> tuple[int, int]:
    """The modes of the folders, and of the files, that are made in ``folder``.

    Nobody but their user may read them; in a folder with the set-group-ID bit (``chmod 2770``) the
    folder's group may read and write them too.
    """
    if os.stat(folder).st_mode & stat.S_ISGID:
        return 0o2770, 0o660
    return 0o700, 0o600


# -- an object in a store --------------------------------------------------------------------------


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


def object_names(fs: Any, path: str) -> set[str]:
    """Return the names in a folder of a store; empty if there is no such folder.

    On S3 that is one request for each 1,000 names.  ``S3FileSystem.ls`` lists the parent of an
    empty folder, too: a Dag with 10,000 runs costs ten further requests.

    :param fs: The store's file system, of fsspec.
    :raises FileNotFoundError: From some clients, if there is no such folder.
    """
    if not hasattr(fs, "call_s3"):
        found = (str(name).rstrip("/") for name in fs.ls(path, detail=False))
        return {name.rpartition("/")[2] for name in found if name != path}
    bucket, key, _ = fs.split_path(path)
    prefix = f"{key}/" if key else ""
    request = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/", **fs.req_kw}
    names: set[str] = set()
    while True:
        page = fs.call_s3("list_objects_v2", **request)
        keys = [entry["Key"] for entry in page.get("Contents", ())]
        keys += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
        names |= {name[len(prefix) :].rstrip("/") for name in keys}
        if not page.get("IsTruncated"):
            return names - {""}
        request["ContinuationToken"] = page["NextContinuationToken"]
