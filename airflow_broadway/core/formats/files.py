"""Small files of a run: the protocol to read and write them, and its implementation on disk.

The functions below the classes write durable files; all of the package uses them.  A file on disk
is readable by its owner only, unless its folder is set up for a group.  Runs in the Spark driver,
too.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from airflow_broadway.core.errors import StagingError

#: The prefix of temporary files.  Listings omit all names that begin with a dot: file managers and
#: synchronizers create their own.
TEMPORARY = ".tmp-"

#: How a Spark driver accesses a run: by Hadoop where that has a file system for the root, else by
#: Arrow; or always by one of them.
AUTO, HADOOP, ARROW = CLIENTS = ("auto", "hadoop", "arrow")

#: Errors of file systems that cannot sync a folder, and need not.
_FOLDERS_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP)

#: Objects that one request to S3 may remove.
_PAGE = 1_000


class Files(Protocol):
    """Reads and writes small files of one run: on disk, in an object store, through Hadoop.

    Paths are relative to the run's folder.

    :raises StagingError: From every method, if a path leads out of the folder.
    """

    def read(self, path: str) -> str:
        """Returns the file's text.

        :raises FileNotFoundError: If there is none.
        """

    def exists(self, path: str) -> bool:
        """Returns whether the file exists."""

    def list(self, folder: str) -> list[str]:
        """Returns a folder's names, sorted, without hidden ones; empty for a missing folder."""

    def modified(self, path: str) -> float | None:
        """Returns a file's modification time, by the file system's clock, in Unix seconds.

        :returns: ``None`` if the file system has none.
        :raises FileNotFoundError: If there is no such file.
        """

    def create(self, path: str, text: str) -> bool:
        """Writes a whole, durable file unless it exists; returns whether this call wrote it.

        Of several concurrent calls exactly one succeeds.
        """

    def replace(self, path: str, text: str) -> None:
        """Writes a whole, durable file, replacing any."""

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        """Writes a new, durable file of lines, streamed; returns the number of lines.

        It is visible while incomplete: publish its name only afterwards.
        """

    def lines(self, path: str) -> Iterator[str]:
        """Iterates over a file's lines, streamed, without newlines.

        :raises FileNotFoundError: If there is none.
        """


def check_path(path: str, folder: str) -> str:
    """Returns ``path`` if it is below ``folder``: paths are read from files, which may be forged.

    :raises StagingError: If it is absolute, or leads out of the folder.
    """
    if path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/"):
        raise StagingError(f"{path!r} is no path below {folder}")
    return path


def check_regular_file(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> None:
    """Refuses symbolic links out of the root, and other than regular files: opening a pipe blocks.

    :raises StagingError: If ``path`` is refused; a missing file is the caller's concern.
    """
    target, home = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath([target, home]) != home:
        raise StagingError(f"{path} leads out of {root} by a symbolic link: remove the link")
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise StagingError(f"{path} is no regular file: remove it")


class LocalFiles:
    """Files on disk below ``root``; see :class:`Files`."""

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
        return create_file(self._make_parents(path), (text.encode(),))

    def replace(self, path: str, text: str) -> None:
        replace_file(self._make_parents(path), (text.encode(),))

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        count = 0
        target = self._make_parents(path)
        with _open_new(target) as file:
            for line in lines:
                file.write(f"{line}\n".encode())
                count += 1
        sync_folder(os.path.dirname(target))
        return count

    def lines(self, path: str) -> Iterator[str]:
        check_regular_file(self._path(path), self.root)
        with self._path(path).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.rstrip("\n")

    def _path(self, path: str) -> Path:
        return self.root / check_path(path, str(self.root))

    def _make_parents(self, path: str) -> str:
        target = self._path(path)
        make_folders(str(target.parent))
        return str(target)


# -- a durable file on a disk ----------------------------------------------------------------------


def create_file(path: str, chunks: Iterable[bytes]) -> bool:
    """Writes a whole, durable file unless it exists; returns whether this call wrote it.

    :param path: A path in an existing folder.
    """
    with _temporary(path, chunks) as temporary:
        try:
            # Fails if the name exists; the linked file is already complete and on disk.
            os.link(temporary, path)
        except FileExistsError:
            # NFS retries a request whose reply was lost: the name is then our own file's.
            if not _is_same_file(temporary, path):
                return False
    sync_folder(os.path.dirname(path))
    return True


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:  # removed meanwhile by its writer
        return False


def replace_file(path: str, chunks: Iterable[bytes]) -> None:
    """Writes a whole, durable file, replacing any.

    :param path: A path in an existing folder.
    """
    with _temporary(path, chunks) as temporary:
        os.replace(temporary, path)
    sync_folder(os.path.dirname(path))


def note_file(path: str, data: bytes) -> None:
    """Writes a whole file, replacing any; durable against a crash of this process, not of the host.

    :param path: A path in an existing folder.
    """
    temporary = os.path.join(os.path.dirname(path), f"{TEMPORARY}{uuid.uuid4().hex}")
    with open(temporary, "xb") as file:
        os.fchmod(file.fileno(), _modes_below(os.path.dirname(path))[1])
        file.write(data)
    os.replace(temporary, path)


@contextmanager
def _temporary(path: str, chunks: Iterable[bytes]) -> Iterator[str]:
    """Writes a complete temporary file next to ``path``; removed when the context ends."""
    temporary = os.path.join(os.path.dirname(path), f"{TEMPORARY}{uuid.uuid4().hex}")
    with _open_new(temporary) as file:
        file.writelines(chunks)
    try:
        yield temporary
    finally:
        with suppress(FileNotFoundError):  # os.replace has renamed it
            os.remove(temporary)


@contextmanager
def _open_new(path: str) -> Iterator[IO[bytes]]:
    """Opens a new file; synced when the context ends, removed on an exception."""
    file = new_file(path)
    try:
        yield file
        sync_file(file)
        file.close()
    except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
        drop_file(file, path)
        raise


def new_file(path: str) -> IO[bytes]:
    """Creates a file and opens it for writing bytes, with its folder's mode whatever the umask.

    :raises FileExistsError: If it exists.
    """
    _, mode = _modes_below(os.path.dirname(path) or ".")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    if mode != 0o600:
        os.fchmod(handle, mode)
    return os.fdopen(handle, "wb")


def drop_file(file: IO[bytes], path: str) -> None:
    """Closes a file and removes it, whether complete or not."""
    with suppress(OSError):  # a full disk fails again when the buffer is flushed
        file.close()
    with suppress(FileNotFoundError):
        os.remove(path)


def sync_file(file: IO[bytes]) -> None:
    """Syncs a file's content to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Syncs a folder's names to disk."""
    handle = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _FOLDERS_NOT_SYNCED:
            raise
    finally:
        os.close(handle)


def make_folders(path: str) -> None:
    """Creates a folder and its missing parents."""
    if os.path.isdir(path):
        return
    make_folders(os.path.dirname(path) or ".")
    with suppress(FileExistsError):
        make_folder(path)


def make_folder(path: str) -> None:
    """Creates one durable folder, with its parent's mode whatever the umask.

    :raises FileExistsError: If it exists.
    """
    parent = os.path.dirname(path) or "."
    mode, _ = _modes_below(parent)
    os.mkdir(path, 0o700)
    if mode != 0o700:
        os.chmod(path, mode)
    sync_folder(parent)


def _modes_below(folder: str) -> tuple[int, int]:
    """Returns the modes of new folders and files in ``folder``.

    Only their owner may access them; in a folder with the set-group-ID bit (``chmod 2770``) the
    folder's group may read and write them, too.
    """
    if os.stat(folder).st_mode & stat.S_ISGID:
        return 0o2770, 0o660
    return 0o700, 0o600


# -- objects in a store ----------------------------------------------------------------------------


def put_new(fs: Any, path: str, data: bytes) -> bool:
    """Puts an object into a store unless it exists; of concurrent calls exactly one succeeds.

    :param fs: The store's fsspec file system.
    :returns: Whether this call wrote it.
    :raises TypeError: If the store's client is too old for conditional puts.
    """
    while True:
        try:
            fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            # Concurrent conditional puts: S3 may refuse one with 409.
            if not _is_conflict(error):
                raise
            fs.invalidate_cache(path.rpartition("/")[0])
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


def object_exists(fs: Any, path: str) -> bool:
    """Returns whether a store has an object.

    On S3 that is one request.  ``S3FileSystem.exists`` also lists a missing object as a folder.

    :param fs: The store's fsspec file system.
    """
    if not hasattr(fs, "call_s3"):
        return bool(fs.exists(path))
    bucket, key, _ = fs.split_path(path)
    try:
        fs.call_s3("head_object", Bucket=bucket, Key=key, **fs.req_kw)
    except FileNotFoundError:
        return False
    return True


def remove_objects(fs: Any, paths: Sequence[str]) -> None:
    """Removes objects of a store that exist; on S3 with one request per 1,000 objects.

    :param fs: The store's fsspec file system.
    :raises PermissionError: If the store denies the removal of one.
    :raises OSError: If it cannot remove one.
    """
    if not hasattr(fs, "call_s3"):
        for path in paths:
            with suppress(FileNotFoundError):
                fs.rm_file(path)
        return
    for start in range(0, len(paths), _PAGE):
        bucket = fs.split_path(paths[start])[0]
        keys = [{"Key": fs.split_path(path)[1]} for path in paths[start : start + _PAGE]]
        request = {"Bucket": bucket, "Delete": {"Objects": keys, "Quiet": True}}
        errors = fs.call_s3("delete_objects", **request, **fs.req_kw).get("Errors")
        if errors:
            kind = PermissionError if errors[0]["Code"] == "AccessDenied" else OSError
            raise kind(f"{errors[0]['Key']}: {errors[0]['Code']}: {errors[0]['Message']}")


def object_names(fs: Any, path: str, until: str | None = None) -> set[str]:
    """Returns the names in a folder of a store; empty for a missing folder.

    On S3 that is one request per 1,000 names.  ``S3FileSystem.ls`` also lists the parent of an
    empty folder: a Dag with 10,000 runs would cost ten further requests.

    :param fs: The store's fsspec file system.
    :param until: Names after this one may be omitted; on S3 they are not requested.
    :raises FileNotFoundError: From some clients, if there is no such folder.
    """
    if not hasattr(fs, "call_s3"):
        entries = (str(name).rstrip("/") for name in fs.ls(path, detail=False))
        return {name.rpartition("/")[2] for name in entries if name != path}
    bucket, key, _ = fs.split_path(path)
    prefix = f"{key}/" if key else ""
    request = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/", **fs.req_kw}
    names: set[str] = set()
    while True:
        page = fs.call_s3("list_objects_v2", **request)
        keys = [entry["Key"] for entry in page.get("Contents", ())]
        keys += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
        names |= {name[len(prefix) :].rstrip("/") for name in keys}
        past = until is not None and any(key[len(prefix) :] > until for key in keys)
        if past or not page.get("IsTruncated"):
            return names - {""}
        request["ContinuationToken"] = page["NextContinuationToken"]
