"""moto's SQS as a process of its own: ``python -m tests.sqs_moto PORT``.

moto is neither thread-safe nor fast enough for measurements.  The changes concern the storage of
messages, never SQS's answers:

- Its threads share lists without a lock: concurrent receives may deliver a message twice, and an
  overtaken delete is undone.  Here one lock guards all messages, released between the polls of a
  long poll.
- It counts a queue's messages for every message sent and received, and scans all of them for every
  delete: at 2,000 messages it serves one receive a second.  Here they are counted on request, found
  by id and receipt, and messages in flight are stored apart.
- Each receive looks for the groups of all messages in flight, also of a queue that has no groups:
  with 10,000 of them it takes a third longer.  Here only a FIFO queue's are looked for.
- When several messages of a FIFO group become visible together, it delivers the last one first.
- It measures the 12 hours of a visibility timeout from the sending; SQS does from the receipt.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from heapq import heappop, heappush
from importlib import import_module
from itertools import count
from typing import Any

from moto.server import main as serve
from moto.sqs.exceptions import InvalidParameterValue, ReceiptHandleIsInvalid

__all__ = ["main"]

#: Imported by name, since the replacements have other types.
models: Any = import_module("moto.sqs.models")

#: The longest visibility timeout from the receipt, in seconds.
LONGEST = 43_200

#: Seconds between the polls of a long poll.
POLL_INTERVAL = 0.05

_LOCK = threading.RLock()


class Shelf:
    """A queue's messages in order, found by id; replaces moto's list.

    :param ordered: Of a FIFO queue; else messages in flight are stored apart.
    """

    def __init__(self, *, ordered: bool) -> None:
        self.by_id: dict[str, Any] = {}
        self._ordered = ordered
        self._ready: deque[Any] = deque()
        #: (end of the timeout, a number, message); one message may have several entries.
        self._hidden: list[tuple[float, int, Any]] = []
        self._in_ready: set[str] = set()
        self._count = count()

    def append(self, message: Any) -> None:
        self.by_id[message.id] = message
        self._put(message)

    def remove(self, message: Any) -> None:
        del self.by_id[message.id]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.by_id.values())

    def hide(self, message: Any) -> None:
        """Records a new visibility timeout."""
        if not self._ordered:
            at = max(message.visible_at, message.delayed_until)
            heappush(self._hidden, (at, next(self._count), message))

    def visible(self, now: float) -> Iterator[Any]:
        """Yields the visible messages, some of which may be received meanwhile."""
        if self._ordered:
            yield from (message for message in self if _shown(message, now))
            return
        while self._hidden and self._hidden[0][0] <= now:
            message = heappop(self._hidden)[2]
            if self._has(message) and message.id not in self._in_ready and _shown(message, now):
                self._put(message)
        seen: list[Any] = []
        try:
            while self._ready:
                message = self._ready.popleft()
                seen.append(message)
                if self._has(message) and _shown(message, now):
                    yield message
        finally:
            for message in reversed(seen):
                self._in_ready.discard(message.id)
                if not self._has(message):
                    continue
                if _shown(message, now):
                    self._ready.appendleft(message)
                    self._in_ready.add(message.id)
                else:
                    self.hide(message)

    def _has(self, message: Any) -> bool:
        return self.by_id.get(message.id) is message

    def _put(self, message: Any) -> None:
        self._ready.append(message)
        self._in_ready.add(message.id)


def _shown(message: Any, now: float) -> bool:
    return bool(message.visible_at < now and message.delayed_until <= now)


class Queue(models.Queue):  # type: ignore[misc]
    """A queue that finds messages by receipt, and counts them on request."""

    # moto derives the service of a model from its module.
    __module__ = models.__name__

    def __init__(self, *args: Any, **options: Any) -> None:
        self.counting = False
        super().__init__(*args, **options)
        self.clear()

    def clear(self) -> None:
        self._messages = Shelf(ordered=bool(self.fifo_queue))
        self._pending_messages: set[Any] = set()
        #: Receipt → message, and the time of the receipt.
        self.receipts: dict[str, tuple[Any, float]] = {}

    @property
    def messages(self) -> Iterator[Any]:
        return self._messages.visible(models.unix_time_millis())

    @property
    def pending_message_groups(self) -> set[str]:
        return super().pending_message_groups if self.fifo_queue else set()

    @property
    def approximate_number_of_messages(self) -> int:
        return sum(1 for _ in self.messages) if self.counting else 0

    @property
    def approximate_number_of_messages_delayed(self) -> int:
        return sum(m.delayed for m in self._messages) if self.counting else 0

    @property
    def approximate_number_of_messages_not_visible(self) -> int:
        return sum(not m.visible for m in self._messages) if self.counting else 0

    def holder(self, receipt: str) -> tuple[Any, float]:
        """Returns the message of a receipt, and the time of the receipt."""
        message, at = self.receipts.get(receipt, (None, 0.0))
        if message is None or self._messages.by_id.get(message.id) is not message:
            raise ReceiptHandleIsInvalid
        return message, at

    def forget_lapsed(self) -> None:
        """Unblocks the groups of visible messages."""
        if self.fifo_queue:
            self._pending_messages = {m for m in self._pending_messages if not m.visible}

    def delete_message(self, receipt_handle: str) -> None:
        if receipt_handle in self.deleted_messages:
            return
        message, _ = self.holder(receipt_handle)
        self.pending_messages.discard(message)
        self._messages.remove(message)
        for receipt in message.all_receipt_handles:
            self.deleted_messages.add(receipt)
            self.receipts.pop(receipt, None)


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """Serializes a method of the backend."""

    @wraps(method)
    def locked(*args: Any, **options: Any) -> Any:
        with _LOCK:
            return method(*args, **options)

    return locked


_receive = models.SQSBackend.receive_message
_get_attributes = models.SQSBackend.get_queue_attributes


def receive_message(
    self: Any, queue_name: str, count: int, wait_seconds_timeout: int, *rest: Any, **options: Any
) -> Any:
    """Repeats moto's receive until it returns messages or the wait is over."""
    end = time.monotonic() + wait_seconds_timeout
    while True:
        with _LOCK:
            queue = self.get_queue(queue_name)
            queue.forget_lapsed()
            received = _receive(self, queue_name, count, 0, *rest, **options)
            for copy in received:
                message = queue._messages.by_id[copy.id]
                queue.receipts[copy.receipt_handle] = (message, time.time())
        left = end - time.monotonic()
        if received or left <= 0:
            return received
        time.sleep(min(POLL_INTERVAL, left))


def change_message_visibility(
    self: Any, queue_name: str, receipt_handle: str, visibility_timeout: int
) -> None:
    """Changes a timeout; finds the message by receipt, limited to 12 hours from the receipt."""
    queue = self.get_queue(queue_name)
    message, at = queue.holder(receipt_handle)
    if time.time() + int(visibility_timeout) - at > LONGEST:
        raise InvalidParameterValue(
            f"Value {visibility_timeout} for parameter VisibilityTimeout is invalid. Reason: Total"
            " VisibilityTimeout for the message is beyond the limit [43200 seconds]"
        )
    message.change_visibility(visibility_timeout)
    queue._messages.hide(message)
    if not int(visibility_timeout):
        queue.pending_messages.discard(message)


def change_message_visibility_batch(
    self: Any, queue_name: str, entries: list[dict[str, Any]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Changes timeouts; reports each refusal as its own entry."""
    done: list[str] = []
    failed: list[dict[str, Any]] = []
    for entry in entries:
        try:
            change_message_visibility(
                self, queue_name, entry["ReceiptHandle"], int(entry["VisibilityTimeout"])
            )
            done.append(entry["Id"])
        except (InvalidParameterValue, ReceiptHandleIsInvalid) as error:
            code = type(error).__name__
            failed.append(
                {"Id": entry["Id"], "SenderFault": True, "Code": code, "Message": str(error)}
            )
    return done, failed


def get_queue_attributes(self: Any, queue_name: str, attribute_names: list[str]) -> Any:
    """Returns the attributes; the only method that counts messages."""
    queue = self.get_queue(queue_name)
    queue.counting = True
    try:
        return _get_attributes(self, queue_name, attribute_names)
    finally:
        queue.counting = False


def in_retention(self: Any, queue_name: str, message: Any) -> bool:
    """Returns whether a message is within the retention."""
    retention = self.get_queue(queue_name).message_retention_period
    return bool(retention + message.sent_timestamp / 1000 > time.time())


def purge_queue(self: Any, queue_name: str) -> None:
    """Removes all messages."""
    self.get_queue(queue_name).clear()


def main() -> None:
    """Serves until killed."""
    # moto reads the time through datetime, 12 µs per call, several calls per message.
    models.unix_time = lambda dt=None: time.time()
    models.unix_time_millis = lambda dt=None: time.time() * 1000.0
    models.Queue = Queue
    backend = models.SQSBackend
    backend.receive_message = receive_message
    backend.is_message_valid_based_on_retention_period = in_retention
    changes = change_message_visibility, change_message_visibility_batch
    for changed in (*changes, get_queue_attributes, purge_queue):
        setattr(backend, changed.__name__, alone(changed))
    for name in ("send_message", "send_message_batch", "delete_message", "delete_message_batch"):
        setattr(backend, name, alone(getattr(backend, name)))
    serve(["-H", "127.0.0.1", "-p", sys.argv[1]])


if __name__ == "__main__":
    main()
