"""Publishes numbered messages continuously and records which the broker confirmed.

The publisher is a thread of the test process; the runs are in other processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

#: Seconds between two calls of ``send``.
_TICK = 0.01
#: Maximum number of messages per call, so that a delayed publisher catches up gradually.
_MOST = 200


def body_of(number: int, size: int = 64) -> bytes:
    """Returns the body of the message with this number."""
    return (b"%010d " % number).ljust(size, b".")


def number_of(body: bytes | str) -> int:
    """Parses the number of a body."""
    return int(body[:10])


class Sender(Protocol):
    """Publishes to a queue with the broker's client library; used from one thread."""

    def send(self, numbers: Sequence[int]) -> Iterable[int]:
        """Publishes messages and waits for the confirms; returns the confirmed numbers."""
        ...

    def close(self) -> None:
        """Releases connections."""
        ...


class Publisher:
    """Publishes at a constant rate from :meth:`__enter__` until :meth:`stop`.

    :param rate: Messages per second; may be changed at any time.
    """

    def __init__(self, sender: Sender, *, rate: float) -> None:
        self._sender = sender
        self.rate = rate
        #: Confirmed numbers and their times on the monotonic clock.
        self.confirmed: dict[int, float] = {}
        #: The number of published messages, confirmed or not.
        self.published = 0
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops and waits for the last confirm; raises the publisher's error, if any."""
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            owed, before = 1.0, time.monotonic()  # publishes the first message immediately
            while not self._stopped.wait(_TICK):
                now = time.monotonic()
                owed, before = min(owed + self.rate * (now - before), _MOST), now
                count = int(owed)
                if count:
                    owed -= count
                    self._publish(range(self.published, self.published + count))
        except BaseException as error:
            self._error = error
        finally:
            self._sender.close()

    def _publish(self, numbers: range) -> None:
        self.published = numbers.stop
        for number in self._sender.send(numbers):
            self.confirmed[number] = time.monotonic()
