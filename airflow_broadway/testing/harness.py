"""What the custody contract wants to know of a producer under test, and what its tests share."""

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
    """One empty queue, and what the suite must be able to do with it.

    A subclass says how a producer of the queue is made, and how a message is sent.

    :param arguments: What another process makes the same harness of: JSON values.  The suite kills
        such processes; the subclass must be found under its module's name.
    """

    #: Seconds of the leases under test; short where time must really pass.
    lease: float = 60.0
    #: So many groups share what :meth:`send` sends, message by message in turn, where the broker
    #: keeps the order of a group; 0: each message has one of its own.
    groups: int = 0
    #: Whether the broker also marks as redelivered what it sent ahead and nobody was given.
    marks_unseen: bool = False

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        #: The clock that both halves go by: the real one, but what it is asked to wait it skips.  A
        #: broker that goes by a clock of its own needs ``SystemClock()``.
        self.clock: Clock = SkippingClock()

    @abstractmethod
    def producer(self) -> Producer:
        """A producer of the queue with ``lease=self.lease``; every call makes an equal one."""

    @abstractmethod
    def send(self, bodies: Sequence[bytes]) -> None:
        """Put messages into the queue, in order."""

    @contextmanager
    def publish_meanwhile(self, *, pause: float = 0.01) -> Iterator[list[bytes]]:
        """Send messages from a thread of its own while the block is at work, one after another.

        Yields the list of those that :meth:`send` has returned from; it is whole once the block has
        ended.  Override it where ``send`` cannot be used from another thread.

        :param pause: Seconds between two, of real time.
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
            except BaseException as error:  # raised where it is seen
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
        """Let time pass, for the producer and its broker."""
        self.clock.sleep(seconds)

    def env(self, generation: str) -> ProducerEnv:
        """What a producer is opened in."""
        owner = {"dag_id": "contract", "run_id": "run", "task_id": "process", "map_index": -1}
        return ProducerEnv(generation=generation, owner=owner, clock=self.clock)


def settlement_of(
    messages: Sequence[Message],
    exceptions: Mapping[str, Verdict] | None = None,
    rest: Verdict = ACK,
) -> Settlement:
    """The settlement of a generation whose manifest names ``messages``.

    :param exceptions: Message id → verdict, for those that do not get ``rest``.
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
    """The messages' ids."""
    return [message.message_id for message in messages]


def bodies(count: int, *, start: int = 0) -> list[bytes]:
    """Different bodies, in order."""
    return [b"message %06d" % number for number in range(start, start + count)]
