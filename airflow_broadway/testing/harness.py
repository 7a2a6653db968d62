"""The interface between the custody contract and a producer under test, and shared helpers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.clock import SkippingClock


class Harness(ABC):
    """One empty queue, and the operations that the suite needs on it.

    A subclass defines how to create a producer of the queue, and how to send messages.

    :param arguments: JSON values from which another process rebuilds the harness.  The suite kills
        such processes; the subclass must be importable by its module's name.
    """

    #: The lease under test in seconds; short where real time must pass.
    lease: float = 60.0
    #: The number of groups to which :meth:`send` assigns messages in turn, for brokers that keep
    #: the order within a group; 0: each message has its own.
    groups: int = 0
    #: Whether the broker also marks prefetched messages that were never received as redelivered.
    marks_unseen: bool = False

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        #: The clock of both halves: the real one, but waits are skipped.  A broker with its own
        #: clock needs ``SystemClock()``.
        self.clock: Clock = SkippingClock()

    @abstractmethod
    def producer(self) -> Producer:
        """Returns a producer of the queue with ``lease=self.lease``; equal on every call."""

    @abstractmethod
    def send(self, bodies: Sequence[bytes]) -> None:
        """Sends messages to the queue, in order."""

    @contextmanager
    def publish_meanwhile(self, *, pause: float = 0.01) -> Iterator[list[bytes]]:
        """Sends messages one by one from another thread while the block runs.

        Yields the list of sent messages; it is complete once the block has ended.  Override it if
        ``send`` cannot be called from another thread.

        :param pause: Real seconds between two messages.
        """
        sent: list[bytes] = []
        failed: list[BaseException] = []
        ended = threading.Event()

        def publish() -> None:
            try:
                while not ended.wait(pause):
                    [body] = bodies(1, start=900_000 + len(sent))
                    self.send([body])
                    sent.append(body)
            except BaseException as error:  # re-raised in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=publish, name="publish_meanwhile")
        thread.start()
        try:
            yield sent
        finally:
            ended.set()
            thread.join()
        if failed:
            raise failed[0]

    def pass_time(self, seconds: float) -> None:
        """Advances time, for the producer and its broker."""
        self.clock.sleep(seconds)

    def env(self, generation: str) -> ProducerEnv:
        """Returns the environment of a producer."""
        owner = {"dag_id": "contract", "run_id": "run", "task_id": "process", "map_index": -1}
        return ProducerEnv(generation=generation, owner=owner, clock=self.clock)


def settlement_of(
    messages: Sequence[Message],
    exceptions: Mapping[str, Verdict] | None = None,
    rest: Verdict = ACK,
) -> Settlement:
    """Builds the settlement of a generation whose manifest names ``messages``.

    :param exceptions: Message id → verdict, for messages with a verdict other than ``rest``.
    """
    verdicts = exceptions or {}
    return Settlement(
        rest=rest,
        entries=lambda: (
            entry_of(message, verdicts[message.message_id])
            for message in messages
            if message.message_id in verdicts
        ),
        everything=lambda: (entry_of(message, rest) for message in messages),
        expected=len(messages),
    )


def ids(messages: Iterable[Message]) -> list[str]:
    """Returns the messages' ids."""
    return [message.message_id for message in messages]


def bodies(count: int, *, start: int = 0) -> list[bytes]:
    """Returns distinct bodies, in order."""
    return [b"message %06d" % number for number in range(start, start + count)]
