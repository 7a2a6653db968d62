"""Pipelines whose callbacks end their process at one message; other processes import them."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from types import ModuleType
from typing import Any

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.testing import DummyProducer

#: Data of messages: where the process ends, and how.
PLACES = ("prepare_messages", "handle_message", "transformer", "partition_by")
WAYS = ("exit", "segv", "kill", "memory")


def end_process(way: str) -> None:
    """End this process as a broken message would."""
    if way == "exit":
        os._exit(3)
    if way == "close":  # as what makes itself a daemon does, and lives
        os.closerange(3, 100)
        time.sleep(60)
    if way == "memory":
        # What an allocation that is refused does in a library without a check.
        resource.setrlimit(resource.RLIMIT_AS, (1 << 26, 1 << 26))
        try:
            bytearray(1 << 30)
        except MemoryError:
            os.abort()
    os.kill(os.getpid(), {"segv": signal.SIGSEGV, "kill": signal.SIGKILL}[way])


def _error_of_a_plugin() -> Exception:
    """An error of a module that this process has loaded by itself: no other can import it."""
    plugin: Any = ModuleType("plugin_of_this_process")
    sys.modules[plugin.__name__] = plugin
    plugin.Error = type("Error", (Exception,), {"__module__": plugin.__name__})
    error: Exception = plugin.Error("of a plugin")
    return error


def _end_up_to(path: str, times: int) -> None:
    """Ends this process, up to ``times`` times."""
    with open(path, "a+") as file:
        file.seek(0)
        if len(file.read()) < times:
            file.write("x")
            file.flush()
            os._exit(3)


def strike(place: str, message: Message) -> None:
    if type(message.data) is str and message.data.startswith(f"{place} "):
        end_process(message.data.split()[1])


def transform(message: Message) -> Message:
    strike("transformer", message)
    return message.put_data(f"{message.data}!" if message.data == "transformed" else message.data)


def partition(message: Message) -> int:
    strike("partition_by", message)
    return message.position


class Killers(Broadway):
    producer = DummyProducer(max_crashes=2, transformer=transform)
    processors = Processors(concurrency=1, max_demand=1000, executor="processes")
    batchers = {"default": Batcher(engine="python")}

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        for message in messages:
            strike("prepare_messages", message)
        return messages

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        strike("handle_message", message)
        if message.data == "fails":
            raise ValueError("fails")
        if type(message.data) is tuple:
            _end_up_to(*message.data)
        if message.data == "unreadable":
            raise _error_of_a_plugin()
        if message.data == "now":
            message = message.ack_immediately()
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class Partitioned(Killers):
    processors = Processors(
        concurrency=2, max_demand=1000, executor="processes", partition_by=partition
    )


class KillsInSetup(Killers):
    def setup(self, run: Any) -> Any:
        os._exit(7)


class KillsAlways(Killers):
    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        os._exit(9)


class OrderedProducer(DummyProducer):
    """Keeps the order of the first letter of a message's data."""

    @property
    def keeps_order(self) -> bool:
        return True

    def group_of(self, message: Message) -> str | None:
        return str(message.data)[0]


class Ordered(Broadway):
    producer = OrderedProducer(max_crashes=1)
    processors = Processors(concurrency=1, max_demand=1000, executor="processes")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data.endswith("dies"):
            os._exit(9)
        return message.failed("no") if message.data.endswith("fails") else message


class Asks(Killers):
    """Callbacks query the host."""

    def setup(self, run: Any) -> Any:
        return hosts.ask("setup")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == "refused":
            hosts.ask(message.data)
        return message.put_data((context, hosts.ask(message.data)))


class SetupFailsInChildren(Killers):
    """As where ``setup`` needs what its parent holds."""

    def setup(self, run: Any) -> Any:
        if os.environ.get("PARENT_OF_TESTS") != str(os.getpid()):
            raise RuntimeError("the port is taken")


class hosts:  # noqa: N801 - a namespace
    """The host of a child, as it is connected there."""

    @staticmethod
    def ask(request: Any) -> Any:
        raise AssertionError("not connected")

    @staticmethod
    def connect(ask: Any) -> None:
        hosts.ask = ask  # type: ignore[method-assign]


class Sleeps(Killers):
    """Writes down its pid, and stays at its message."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        with open(message.data, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60.0)
        return message
