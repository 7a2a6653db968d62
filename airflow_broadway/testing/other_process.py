"""A second process that uses the queue under test, and is killed by the custody contract."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, Final, Self

from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.formats.entries import load_line
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.harness import Harness, ids


class Child:
    """A second process on the same queue; communicates in lines of JSON, and can be killed."""

    def __init__(self, harness: Harness, *command: str) -> None:
        reference = f"{type(harness).__module__}:{type(harness).__qualname__}"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, reference, json.dumps(harness.arguments), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def send(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the other process ended with {self._process.wait()}; see its output"
        return json.loads(line)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def _send(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _hold(harness: Harness, generation: str, demand: str) -> None:
    """Receives and secures ``demand`` messages, and waits to be killed."""
    source = harness.producer().source(harness.env(generation))
    messages: list[Message] = []
    while len(messages) < int(demand):
        messages += source.secure(source.receive(int(demand) - len(messages), timeout=1.0))
    # Let pending acknowledgements of the originals arrive: a kill now would requeue them
    time.sleep(0.5)
    _send({"ids": ids(messages), "lease": source.lease.to_json()})
    sys.stdin.readline()


def _settle(harness: Harness) -> None:
    """Settles the lease read from standard input, and waits to be killed."""
    request = json.loads(sys.stdin.readline())
    entries = [load_line(line).entry for line in request["entries"]]
    settlement = Settlement(
        rest=ACK,
        entries=lambda: (entry for entry in entries if entry.verdict != ACK),
        everything=lambda: iter(entries),
        expected=len(entries),
    )
    custodian = harness.producer().custodian(harness.env("custodian"))
    _send("go")
    custodian.settle(Lease.from_json(request["lease"]), settlement)
    sys.stdin.readline()


def _drain(harness: Harness, generation: str) -> None:
    """Receives and secures all messages."""
    source = harness.producer().source(harness.env(generation))
    drained: list[str] = []
    while messages := source.secure(source.receive(17, timeout=0.5)):
        drained += ids(messages)
    _send({"ids": drained})


def _requeue(harness: Harness) -> None:
    """Requeues all dead letters."""
    letters = harness.producer().dead_letters(harness.env("letters"))
    _send("go")
    moved = letters.requeue()
    _send({"count": moved.count})
    sys.stdin.readline()


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "hold": _hold,
    "settle": _settle,
    "drain": _drain,
    "requeue": _requeue,
}


def _main(reference: str, arguments: str, command: str, *options: str) -> None:
    """Runs one command in the second process."""
    harness: Harness = resolve_name(reference)(*json.loads(arguments))
    _COMMANDS[command](harness, *options)


if __name__ == "__main__":
    _main(*sys.argv[1:])
