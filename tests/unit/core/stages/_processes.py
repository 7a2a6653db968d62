"""A pipeline for processes of their own, which must import it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.testing import DummyProducer


class OddError(Exception):
    """One that pickles but does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class InProcesses(Broadway):
    producer = DummyProducer()
    processors = Processors(concurrency=2, max_demand=10, executor="processes")
    batchers = {"default": Batcher(engine="python", batch_size=1000)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        match message.data:
            case "odd":
                raise OddError("a", "b")
            case "unpicklable":
                return message.put_data(lambda: 0)
            case "now":
                return message.ack_immediately()
            case "dead":
                return message.configure_ack(on_success="dead_letter")
            case "wrong":
                return message.configure_ack(on_success="wrong")
            case "die":
                os._exit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "exit":
                sys.exit(message.metadata.get("code"))
            case "stdin":
                read = subprocess.run(["cat"], stdout=subprocess.PIPE, check=True).stdout
                return message.put_data((sys.stdin.read(), read))
            case "terminated":
                os.kill(os.getpid(), signal.SIGTERM)
            case "forked":
                return message.put_data(_pipes_of_a_fork())
            case "descriptors":
                script = "import os; print(len(os.listdir('/proc/self/fd')))"
                # What a callback starts without a thought for descriptors
                command = [sys.executable, "-c", script]
                started = subprocess.run(command, close_fds=False, capture_output=True, check=True)
                return message.put_data(int(started.stdout))
        return message.put_data((message.data, os.getpid()))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


def _pipes_of_a_fork() -> list[str]:
    """The pipes that a fork of this process holds, beyond its standard ones and one of its own."""
    read, write = os.pipe()
    if not os.fork():
        known = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2, write)}
        targets = {os.readlink(p) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()}
        os.write(write, json.dumps([*(targets - known)]).encode())
        os._exit(0)
    os.wait()
    os.close(write)
    with os.fdopen(read) as file:
        return [pipe for pipe in json.load(file) if pipe.startswith("pipe:")]


class WithoutBatchers(InProcesses):
    batchers: Any = {}
