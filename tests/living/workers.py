"""Handles of the processes under test: commands, signals, kills."""

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
def _nursery() -> socket.socket:
    """Where workers come from: a process that has imported everything, and forks them.

    It ends with this one.
    """
    here, there = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.living.worker", str(there.fileno())],
        stdout=subprocess.DEVNULL,
        pass_fds=[there.fileno()],
        cwd=_ROOT,
    )
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


class Worker:
    """A process under test; one may serve several series, one after another.

    :param log: Where its log goes.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._socket, there = socket.socketpair()
        with there:
            socket.send_fds(_nursery(), [str(log).encode()], [there.fileno()])
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._process = psutil.Process(self.answer()["pid"])

    def tell(self, command: dict[str, Any]) -> None:
        """Begins a run."""
        self._socket.sendall(json.dumps(command).encode() + b"\n")

    def answer(self, *, timeout: float = 240.0) -> dict[str, Any]:
        """Waits until the run is over."""
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            line = ""
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the worker does not answer: {tail}")
        report: dict[str, Any] = json.loads(line)
        return report

    @property
    def done(self) -> bool:
        """Whether an answer is there."""
        return not self._answers.empty()

    def frozen(self) -> bool:
        """Waits until the run is over, or the process stopped; whether it is stopped."""
        while not self.done:
            if self._process.status() == psutil.STATUS_STOPPED:
                return True
            time.sleep(0.01)
        return False

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return self._process.children(recursive=True)

    def end(self) -> None:
        """Kills it; its messages are released by others.  Safe to repeat."""
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
                    self._answers.put(line)
        except OSError:
            pass
        self._answers.put("")
