"""Ends this process as a message may that kills it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
from collections.abc import Callable
from typing import Final


def die(way: str) -> None:
    """End this process: by one of :data:`WAYS`, or with its whole process group."""
    if way == "group":
        os.killpg(0, signal.SIGKILL)
    faulthandler.disable()  # pytest would have it tell of each
    WAYS[way]()
    raise AssertionError(f"this process outlived {way!r}")


def _run_out_of_memory() -> None:
    """Take memory until there is none, as an extension in C that does not check for that."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000, resource.RLIM_INFINITY))
    while True:
        libc.memset(libc.malloc(10_000_000), 1, 10_000_000)


#: Ways to end, by name.
WAYS: Final[dict[str, Callable[[], object]]] = {
    "exit": lambda: os._exit(9),
    "segfault": lambda: ctypes.memset(0, 1, 1),
    "memory": _run_out_of_memory,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
