"""What every implementation of :class:`~airflow_broadway.core.formats.manifest.Files` goes by.

Which paths it takes, and who may read what it makes on a disk.  Runs on the Spark driver too.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import IO, Any

from airflow_broadway.core.errors import StagingError

__all__ = ["check_path", "make_folder", "make_folders", "modes_below", "new_file", "put_new"]


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
