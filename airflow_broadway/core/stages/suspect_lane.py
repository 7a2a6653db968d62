"""Handles suspects next to the other processors: in a child process, fed by its own thread.

A *suspect* is a message that may have killed an earlier process.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.stages.isolating_processor import IsolatingProcessor
from airflow_broadway.core.stages.processor import ChunkResult
from airflow_broadway.core.stages.worker_pool import WorkerPool

log = logging.getLogger(__name__)

#: Portions that may wait for the child process before receiving pauses.
_MOST_WAITING: Final = 2

#: A chunk, and its result.
Handled = tuple[list[Message], ChunkResult]


class Suspects(Protocol):
    """Identifies messages that may have killed an earlier process, and records those in hand."""

    def is_suspect(self, message: Message) -> bool:
        """Returns whether the message is to be handled apart."""

    def reason_to_blame(self, message: Message) -> str:
        """Returns why the message is dead-lettered unhandled; empty if it is handled."""

    def portions(self, messages: Sequence[Message]) -> Iterable[list[Message]]:
        """Divides messages, in order, into portions that may be in hand together."""

    def note_in_hand(self, messages: Sequence[Message]) -> None:
        """Records which messages the child process handles from now on; none when it is done."""


class SuspectLane:
    """One more processor of a pool, which handles the suspects.

    :param suspects: Selects them; ``None``: there are none.
    :param make: Creates the processor, for the first suspect.
    :param size: The maximum number of messages in a chunk.
    """

    def __init__(
        self, suspects: Suspects | None, make: Callable[[], IsolatingProcessor], *, size: int
    ) -> None:
        self._suspects = suspects
        self._make = make
        self._size = size
        self._processor: IsolatingProcessor | None = None
        self._pool = WorkerPool([self._handle], name="suspects")
        self._waiting: deque[list[Message]] = deque()
        #: Whether no child process can be started, and the messages that it was to handle.
        self._broken = False
        self._returned: list[Message] = []

    def split(self, dispatch: list[Message]) -> tuple[list[Message], list[Message]]:
        """Divides a dispatch into suspects and other messages."""
        if self._suspects is None or self._broken:
            return [], dispatch
        is_suspect = self._suspects.is_suspect
        suspects = [message for message in dispatch if is_suspect(message)]
        if not suspects:
            return suspects, dispatch
        return suspects, [message for message in dispatch if not is_suspect(message)]

    def add(self, messages: Sequence[Message]) -> None:
        """Queues messages to be handled, in order."""
        if self._suspects is not None:
            self._waiting.extend(self._suspects.portions(messages))
            self._feed()

    def _feed(self) -> None:
        while self._waiting and self._pool.put(self._waiting[0], timeout=0.0):
            self._waiting.popleft()

    @property
    def under_way(self) -> int:
        """The number of portions added whose results have not been taken."""
        return len(self._waiting) + self._pool.under_way

    @property
    def full(self) -> bool:
        """Whether receiving must pause until a portion is done."""
        return len(self._waiting) >= _MOST_WAITING

    def take(self) -> list[Handled]:
        """Returns finished results; never waits.

        :raises BaseException: An exception that the processor does not handle.
        """
        taken = self._pool.take()
        self._feed()
        return [handled for _, portion in taken for handled in portion]

    def wait(self, timeout: float | None) -> bool:
        """Waits until :meth:`take` has a result or nothing is in process; returns whether so."""
        return self._pool.wait(timeout)

    def take_back(self) -> list[Message]:
        """Returns the messages for which no child process could be started, in order."""
        returned, self._returned = self._returned, []
        return returned

    def left(self) -> tuple[list[Handled], list[list[Message]]]:
        """Returns everything not taken: results, and messages without one."""
        done, portions = self._pool.left()
        chunks = [*portions, *self._waiting, self._returned]
        return [handled for _, portion in done for handled in portion], chunks

    def _handle(self, portion: list[Message]) -> list[Handled]:
        """Handles a portion, in the lane's own thread."""
        suspects = self._suspects
        assert suspects is not None
        processor = self._start_processor()  # no message is in hand before that
        if processor is None:
            self._returned += portion
            return []
        if len(portion) == 1:
            reason = suspects.reason_to_blame(portion[0])
            if reason:
                return [(portion, processor.blame(portion[0], reason))]
        suspects.note_in_hand(portion)
        handled = []
        for start in range(0, len(portion), self._size):
            chunk = portion[start : start + self._size]
            handled.append((chunk, processor.handle(chunk)))
        if not self._waiting:  # the next portion replaces the record
            suspects.note_in_hand([])
        return handled

    def _start_processor(self) -> IsolatingProcessor | None:
        """Returns the processor with its child process; ``None`` if none can be started."""
        if self._broken:
            return None
        try:
            if self._processor is None:
                self._processor = self._make()
            self._processor.start()
        except Exception as error:  # any exception of the pipeline's module or setup()
            self._broken = True
            log.error(
                "Redelivered messages are handled in this process, though one of them may have"
                " killed an earlier one: no child process could be started for them (%s: %s)",
                type(error).__name__,
                error,
            )
        return None if self._broken else self._processor

    def close(self) -> None:
        """Ends the child process; it finishes no chunk."""
        if self._processor is not None:
            self._processor.close()
        self._pool.close()
