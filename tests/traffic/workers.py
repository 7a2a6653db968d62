"""Starts and controls worker processes: commands, signals, kills."""

from __future__ import annotations

import atexit
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil

_ROOT = Path(__file__).resolve().parents[2]


@cache
def _fork_server() -> socket.socket:
    """Starts the process that forks workers; it ends with this process."""
    local, remote = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.traffic.worker", str(remote.fileno())],
        stdout=subprocess.DEVNULL,
        pass_fds=[remote.fileno()],
        cwd=_ROOT,
    )
    remote.close()

    def end() -> None:
        local.close()
        process.wait()

    atexit.register(end)
    return local


class Worker:
    """A worker process; it may execute runs of several series.

    :param log: The file of its log.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._socket, remote = socket.socketpair()
        with remote:
            socket.send_fds(_fork_server(), [str(log).encode()], [remote.fileno()])
        self._responses: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._process = psutil.Process(self.wait_for_response()["pid"])

    def send(self, command: dict[str, Any]) -> None:
        """Sends the command of a run."""
        self._socket.sendall(json.dumps(command).encode() + b"\n")

    def wait_for_response(self, *, timeout: float = 240.0) -> dict[str, Any]:
        """Waits for the end of the run; returns the response."""
        try:
            line = self._responses.get(timeout=timeout)
        except queue.Empty:
            line = ""
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the worker does not respond: {tail}")
        report: dict[str, Any] = json.loads(line)
        return report

    @property
    def done(self) -> bool:
        """Whether a response has arrived."""
        return not self._responses.empty()

    def wait_until_stopped(self) -> bool:
        """Waits until the run ends or the process stops; returns whether it stopped."""
        while not self.done:
            if self._process.status() == psutil.STATUS_STOPPED:
                return True
            time.sleep(0.01)
        return False

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        self._process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """Returns the child processes of the worker."""
        return self._process.children(recursive=True)

    def kill(self) -> None:
        """Kills the process.  Safe to repeat."""
        try:
            self._process.kill()
            self._process.wait()
        except psutil.NoSuchProcess:
            pass
        self._socket.close()

    def _listen(self) -> None:
        try:
            with self._socket.makefile() as lines:
                for line in lines:
                    self._responses.put(line)
        except OSError:
            pass
        self._responses.put("")
