"""A pipeline for processes of their own, which must import it."""

from __future__ import annotations

import os
import subprocess
import sys
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
            case "descriptors":
                told = "import os; print(len(os.listdir('/proc/self/fd')))"
                # What a callback starts without a thought for descriptors
                command = [sys.executable, "-c", told]
                started = subprocess.run(command, close_fds=False, capture_output=True, check=True)
                return message.put_data(int(started.stdout))
        return message.put_data((message.data, os.getpid()))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class WithoutBatchers(InProcesses):
    batchers: Any = {}
