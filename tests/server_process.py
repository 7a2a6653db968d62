"""Servers of the tests, as child processes of this one: started, awaited, ended with the session.

pytest-xdist kills a worker that takes more than ten seconds from the session's end to its exit.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

#: Called, the last one first, at the end of the test session, or else at the exit of this process.
at_end = ExitStack()
atexit.register(at_end.close)


def session_folder(name: str) -> Path:
    """Creates a folder that is removed with the session."""
    folder = Path(tempfile.mkdtemp(prefix=f"broadway-{name}-"))
    at_end.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Server(ABC):
    """A server that is stopped at the end of a ``with`` block."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it gracefully."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_process(
    command: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a server as a process group; appends its output to a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def await_start(
    process: subprocess.Popen[bytes],
    answers: Callable[[], bool],
    *,
    log: Path,
    name: str,
    stop: Callable[[], None],
    wait: float,
) -> None:
    """Waits until a server answers.

    :raises RuntimeError: With the end of its log, if it ends or stays silent; it is stopped.
    """
    end = time.monotonic() + wait
    while not answers():
        if process.poll() is not None or time.monotonic() > end:
            stop()
            raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def answers(host: str, port: int) -> bool:
    """Returns whether a server accepts connections."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
