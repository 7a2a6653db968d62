"""Translates errors of file systems into a :class:`StagingError` with path, cause and remedy."""

from __future__ import annotations

import errno
import getpass
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_broadway.core.errors import BroadwayError, StagingError

#: The setting that every remedy names.
SETTING = "`[broadway] staging`"

_FULL = f"free space there, or set {SETTING} to a folder with more"
_REMEDIES = {
    errno.ENOSPC: ("no space is left on its disk", _FULL),
    errno.EDQUOT: ("the disk quota of its user is used up", _FULL),
    errno.EROFS: ("its file system is read-only", f"set {SETTING} to a folder that can be written"),
    errno.ENOENT: (
        "the folder does not exist",
        f"mount or create it, or set {SETTING} to one that exists",
    ),
    errno.ENOTDIR: ("a part of the path is no folder", f"set {SETTING} to a folder"),
    errno.EISDIR: ("a folder stands where a file belongs", f"set {SETTING} to a folder of its own"),
}
_DENIED = (errno.EACCES, errno.EPERM)
_NO_LINKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def cannot(doing: str, uri: str, cause: BaseException | str) -> StagingError:
    """Returns the error for a failure of ``doing`` (``"write x.json"``) in the folder ``uri``."""
    number = cause.errno if isinstance(cause, OSError) else None
    if number in _REMEDIES:
        reason, cure = _REMEDIES[number]
    elif number in _DENIED or isinstance(cause, PermissionError):
        reason, cure = _explain_denied(doing, uri)
    elif number in _NO_LINKS:
        reason = "its file system has no hard links, which writing exactly once needs"
        cure = f"set {SETTING} to a local disk, NFS or an object store"
    else:
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, BaseException) and not isinstance(cause, OSError):
            reason = f"{type(cause).__name__}: {reason}"
        cure = f"check {SETTING} and its connection"
    return StagingError(f"cannot {doing} in the staging folder {uri}: {reason}; {cure}")


@contextmanager
def translated(doing: str, uri: str) -> Iterator[None]:
    """Raises :class:`StagingError` for any error of a file system or its client.

    ``FileNotFoundError`` and ``FileExistsError`` pass unchanged, since callers handle them.
    """
    try:
        yield
    except (BroadwayError, FileNotFoundError, FileExistsError, AssertionError):
        raise
    except Exception as error:
        raise cannot(doing, uri, error) from error


#: The permission that an identity needs, by the first word of ``doing``.
_S3_ACTIONS = {
    "read": "s3:GetObject",
    "write": "s3:PutObject",
    "remove": "s3:DeleteObject",
    "list": "s3:ListBucket",
    "look": "s3:GetObject and s3:ListBucket",
}


def _explain_denied(doing: str, uri: str) -> tuple[str, str]:
    scheme, mark, location = uri.partition("://")
    if not mark or scheme == "file":
        return (
            f"{_user()} is not allowed to",
            f"change its owner or mode, or set {SETTING} to a folder that can be written",
        )
    conn_id, _, bucket = location.partition("/")[0].rpartition("@")
    identity = (
        f"the identity of the Airflow connection {conn_id!r}"
        if conn_id
        else "the credentials of this process"
    )
    action = _S3_ACTIONS.get(doing.partition(" ")[0]) if scheme.startswith("s3") else None
    right = f"{action} there" if action else "this"
    return f"the store refused ({identity}, bucket {bucket!r})", f"allow it {right}"


def _user() -> str:
    try:
        return f"the user {getpass.getuser()!r}"
    except (KeyError, OSError):
        return "the user"
