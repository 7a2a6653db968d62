"""Publishes continuously next to the runs: numbered messages, and which the broker confirmed.

A publisher is a thread of the process that watches; the runs are at work in processes of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

#: Seconds between two portions.
_TICK = 0.01
#: The most messages of a portion: a publisher that fell behind does not catch up in one go.
_MOST = 200


def body_of(number: int, size: int = 64) -> bytes:
    """The body of the message with this number."""
    return (b"%010d " % number).ljust(size, b".")


def number_of(body: bytes | str) -> int:
    """The number in a body."""
    return int(body[:10])


class Sender(Protocol):
    """Publishes to one queue, with the broker's own client; used from one thread."""

    def send(self, numbers: Sequence[int]) -> Iterable[int]:
        """Publishes these, and waits; returns those that the broker confirmed."""
        ...

    def close(self) -> None:
        """Releases connections."""
        ...


class Publisher:
    """Publishes at a rate, from :meth:`__enter__` until :meth:`stop`.

    :param rate: Messages per second; may be changed at any time.
    """

    def __init__(self, sender: Sender, *, rate: float) -> None:
        self._sender = sender
        self.rate = rate
        #: When which number was confirmed, on the monotonic clock.
        self.confirmed: dict[int, float] = {}
        #: How many were published, confirmed or not.
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
        """Publishes no more, and waits for the last confirm; raises what went wrong meanwhile."""
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            owed, before = 1.0, time.monotonic()  # the first one at once
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
