"""The boundary of plain files and folders."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace


class LocalFiles:
    """Intercepts file operations below one folder: create, sync, link, replace, remove, list, read.

    Half of a sync writes the first half of the file's bytes.

    :param folder: Files elsewhere do not belong to the pipeline, and are not intercepted.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.realpath(folder) + os.sep

    def install(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        replace(os, "open", self._os_open)
        opened = self._opened(io.open)
        builtins.open = opened
        io.open = opened
        replace(os, "fsync", self._fsync)
        for name in ("link", "replace", "rename"):
            replace(os, name, self._two_paths(name))
        for name, kind in (
            ("remove", "remove"),
            ("unlink", "remove"),
            ("mkdir", "mkdir"),
            ("rmdir", "rmdir"),
        ):
            replace(os, name, self._one_path(kind, changes=True))
        for name in ("listdir", "scandir"):
            replace(os, name, self._one_path("list", changes=False))

    # -- replacements ----------------------------------------------------------------------------

    def _os_open(self, do: Any) -> Any:
        def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            name = self._name(path, kwargs.get("dir_fd"))
            if name is None or not flags & os.O_CREAT:
                return do(path, flags, *args, **kwargs)
            return self._call("create", name, lambda: do(path, flags, *args, **kwargs), room=True)

        return open_file

    def _opened(self, do: Any) -> Any:
        def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            name = None if isinstance(file, int) else self._name(file)
            if name is None:
                return do(file, mode, *args, **kwargs)
            writes = any(flag in mode for flag in "wxa+")
            return self._call(
                "create" if writes else "read",
                name,
                lambda: do(file, mode, *args, **kwargs),
                changes=writes,
                room=writes,
            )

        return open_file

    def _fsync(self, do: Any) -> Any:
        def fsync(handle: Any) -> Any:
            number = handle if isinstance(handle, int) else handle.fileno()
            path = os.readlink(f"/proc/self/fd/{number}")
            name = self._name(path)
            if name is None:
                return do(handle)
            if os.path.isdir(path):
                return self._call("sync", name, lambda: do(handle), changes=False)

            def half() -> None:
                os.ftruncate(number, os.fstat(number).st_size // 2)

            return self._call("write", name, lambda: do(handle), half=half, room=True)

        return fsync

    def _two_paths(self, kind: str) -> Callable[[Any], Any]:
        def wrap(do: Any) -> Any:
            def of_two(source: Any, target: Any, **kwargs: Any) -> Any:
                name = self._name(target)
                if name is None:
                    return do(source, target, **kwargs)
                return self._call(kind, name, lambda: do(source, target, **kwargs), room=True)

            return of_two

        return wrap

    def _one_path(self, kind: str, *, changes: bool) -> Callable[[Any], Any]:
        def wrap(do: Any) -> Any:
            def of_one(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
                name = self._name(path, kwargs.get("dir_fd"))
                if name is None:
                    return do(path, *args, **kwargs)
                return self._call(
                    kind,
                    name,
                    lambda: do(path, *args, **kwargs),
                    changes=changes,
                    room=kind == "mkdir",
                )

            return of_one

        return wrap

    # -- one call --------------------------------------------------------------------------------

    def _name(self, path: Any, folder: int | None = None) -> str | None:
        """Returns the path relative to the folder; ``None`` if it is outside."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        text = os.fsdecode(path)
        if folder is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        # Not realpath, which would read each part and resolve links that are being created.
        text = os.path.abspath(text)
        return text[len(self._folder) :] if text.startswith(self._folder) else None

    def _call(
        self,
        kind: str,
        name: str,
        do: Callable[[], Any],
        *,
        half: Callable[[], object] | None = None,
        changes: bool = True,
        room: bool = False,
    ) -> Any:
        return self._interceptor.call(
            kind, name, do, half=half, changes=changes, full=_no_room if room else None
        )


def _no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
