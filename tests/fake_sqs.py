"""A boto3 client of SQS that keeps SQS's own rules, in memory and on any clock.

moto accepts receipts that SQS refuses; this one does not: only the newest receipt of a message
settles it, and only while the message is in flight.  ``answer`` replaces the answer of any request,
or raises an error.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_broadway.core.clock import Clock, SystemClock

URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders"
_MOST = 43_200


def client_error(code: str, text: str = "", *, status: int = 400, action: str = "Any") -> Exception:
    """Returns the error that botocore raises for this code."""
    from botocore.exceptions import ClientError

    answer: Any = {
        "Error": {"Code": code, "Message": text},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error: Exception = ClientError(answer, action)
    return error


class _Message:
    __slots__ = ("body", "count", "group", "key", "more", "place", "receipt", "received", "visible")

    def __init__(self, place: int, body: str, group: str, more: dict[str, Any]) -> None:
        self.place = place
        self.key = f"m{place}"
        self.body = body
        self.group = group
        self.more = more
        self.receipt = ""
        self.count = 0
        self.received = 0.0
        self.visible = 0.0


class _Queue:
    def __init__(self) -> None:
        self.ready: deque[_Message] = deque()
        self.flying: list[tuple[float, int, _Message]] = []
        self.known: dict[str, _Message] = {}
        #: Receipt → message id.
        self.keys: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self.sent: list[dict[str, Any]] = []
        #: The receipts by which messages were deleted.
        self.deleted: set[str] = set()
        #: Of a FIFO queue: the attempt's id → its answer.
        self.attempts: dict[str, list[_Message]] = {}


class FakeSqs:
    """A client; every queue exists.

    :param answer: Called as ``answer(action, arguments)`` before each request: an exception to
        raise, a dictionary to answer, or ``None`` to do what SQS would.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.answer: Callable[[str, dict[str, Any]], Any] = lambda action, arguments: None
        self.meta = SimpleNamespace(region_name="eu-west-1", endpoint_url="https://sqs.test")
        #: Action → requests; and the entries in them.
        self.requests: Counter[str] = Counter()
        self.entries: Counter[str] = Counter()
        #: The arguments of all requests, where a test wants them.
        self.log: list[tuple[str, dict[str, Any]]] | None = []
        self._queues: dict[str, _Queue] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def queue(self, url: str = URL) -> _Queue:
        return self._queues.setdefault(url, _Queue())

    def put(self, bodies: Sequence[str], *, url: str = URL, group: str = "", **more: Any) -> None:
        """Sends messages to a queue."""
        queue = self.queue(url)
        for body in bodies:
            message = _Message(next(self._numbers), body, group, more)
            queue.known[message.key] = message
            queue.ready.append(message)

    def answers(self, action: str, answer: Any) -> None:
        """Answers every request of one action from now on; ``answer`` may be a function."""

        def reply(requested: str, arguments: dict[str, Any]) -> Any:
            if requested != action:
                return None
            return answer(arguments) if callable(answer) else answer

        self.answer = reply

    def obey(self) -> None:
        """Answers by the rules alone from now on."""
        self.answer = lambda action, arguments: None

    def receive(self, timeout: int = 600) -> dict[str, Any]:
        """Receives one message, as another client does."""
        answer = self.receive_message(
            QueueUrl=URL, MaxNumberOfMessages=1, VisibilityTimeout=timeout
        )
        message: dict[str, Any] = answer["Messages"][0]
        return message

    def waiting(self, url: str = URL) -> list[str]:
        """Returns the bodies of visible messages."""
        self._wake(self.queue(url))
        return [message.body for message in self.queue(url).ready]

    def left(self, url: str = URL) -> int:
        """Returns the number of messages that are not deleted."""
        return len(self.queue(url).known)

    # -- boto3's client -----------------------------------------------------------------------

    def close(self) -> None:
        pass

    def receive_message(self, **arguments: Any) -> dict[str, Any]:
        answer = self._given("ReceiveMessage", arguments)
        if answer is not None:
            return answer
        with self._lock:
            queue, now = self.queue(arguments["QueueUrl"]), self._now()
            self._wake(queue)
            busy: set[str] = set()
            if arguments["QueueUrl"].endswith(".fifo"):
                busy = {
                    message.group
                    for until, _, message in queue.flying
                    if message.group and message.visible == until and message.key in queue.known
                }
                queue.ready = deque(sorted(queue.ready, key=lambda message: message.place))
            again = queue.attempts.get(arguments.get("ReceiveRequestAttemptId", ""))
            if again is not None:  # a retry after a lost answer
                return {"Messages": [self._shown(message) for message in again]}
            found: list[dict[str, Any]] = []
            later: list[_Message] = []
            while queue.ready and len(found) < arguments["MaxNumberOfMessages"]:
                message = queue.ready.popleft()
                if busy and message.group in busy:
                    later.append(message)
                    continue
                message.receipt = f"r{next(self._numbers)}"
                message.count += 1
                message.received = now
                self._hide(queue, message, now + arguments["VisibilityTimeout"])
                found.append(self._shown(message))
                if "ReceiveRequestAttemptId" in arguments:
                    attempt = arguments["ReceiveRequestAttemptId"]
                    queue.attempts.setdefault(attempt, []).append(message)
            queue.ready.extendleft(reversed(later))
            self._wake(queue)  # messages received with a visibility timeout of 0
            return {"Messages": found} if found else {}

    def delete_message_batch(self, **arguments: Any) -> dict[str, Any]:
        def delete(queue: _Queue, entry: dict[str, Any]) -> dict[str, Any] | None:
            receipt = entry["ReceiptHandle"]
            message = self._by_receipt(queue, receipt)
            if message is None:
                # Deleting once more by the same receipt is no error.
                return None if receipt in queue.deleted else _failed("ReceiptHandleIsInvalid")
            del queue.known[message.key]
            queue.deleted.add(receipt)
            return None

        return self._batch("DeleteMessage", arguments, delete)

    def change_message_visibility_batch(self, **arguments: Any) -> dict[str, Any]:
        now = self._now()

        def change(queue: _Queue, entry: dict[str, Any]) -> dict[str, Any] | None:
            message = self._by_receipt(queue, entry["ReceiptHandle"])
            if message is None:
                return _failed("ReceiptHandleIsInvalid")
            if message.visible <= now:
                return _failed("AWS.SimpleQueueService.MessageNotInflight")
            if now + entry["VisibilityTimeout"] > message.received + _MOST:
                text = "Total VisibilityTimeout for the message is beyond the limit [43200 seconds]"
                return _failed("InvalidParameterValue", text)
            self._hide(queue, message, now + entry["VisibilityTimeout"])
            if not entry["VisibilityTimeout"]:
                self._wake(queue)
            return None

        return self._batch("ChangeMessageVisibility", arguments, change)

    def send_message_batch(self, **arguments: Any) -> dict[str, Any]:
        def send(queue: _Queue, entry: dict[str, Any]) -> dict[str, Any] | None:
            queue.sent.append(entry)
            return None

        return self._batch("SendMessage", arguments, send)

    def get_queue_attributes(self, **arguments: Any) -> dict[str, Any]:
        answer = self._given("GetQueueAttributes", arguments)
        return answer or {"Attributes": dict(self.queue(arguments["QueueUrl"]).attributes)}

    def get_queue_url(self, **arguments: Any) -> dict[str, Any]:
        answer = self._given("GetQueueUrl", arguments)
        return answer or {"QueueUrl": URL.rpartition("/")[0] + "/" + arguments["QueueName"]}

    # -- rules ---------------------------------------------------------------------------------

    def _batch(
        self,
        action: str,
        arguments: dict[str, Any],
        item: Callable[[_Queue, dict[str, Any]], dict[str, Any] | None],
    ) -> dict[str, Any]:
        entries = arguments["Entries"]
        assert 1 <= len(entries) <= 10, "SQS takes up to ten entries"
        assert len({entry["Id"] for entry in entries}) == len(entries), "ids are distinct"
        answer = self._given(action, arguments)
        if answer is not None:
            return answer
        failed, done = [], []
        with self._lock:
            self.entries[action] += len(entries)
            queue = self.queue(arguments["QueueUrl"])
            for entry in entries:
                error = item(queue, entry)
                if error is None:
                    done.append({"Id": entry["Id"]})
                else:
                    failed.append({"Id": entry["Id"], **error})
        return {"Successful": done, "Failed": failed}

    def _given(self, action: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        with self._lock:
            self.requests[action] += 1
            if self.log is not None:
                self.log.append((action, arguments))
        answer = self.answer(action, arguments)
        if isinstance(answer, BaseException):
            raise answer
        return cast("dict[str, Any] | None", answer)

    def _by_receipt(self, queue: _Queue, receipt: str) -> _Message | None:
        key = queue.keys.get(receipt)
        message = queue.known.get(key) if key else None
        return message if message is not None and message.receipt == receipt else None

    def _hide(self, queue: _Queue, message: _Message, until: float) -> None:
        message.visible = until
        queue.keys[message.receipt] = message.key
        heapq.heappush(queue.flying, (until, next(self._numbers), message))

    def _wake(self, queue: _Queue) -> None:
        """Makes messages visible whose timeout is over."""
        now = self._now()
        while queue.flying and queue.flying[0][0] <= now:
            until, _, message = heapq.heappop(queue.flying)
            if message.visible == until and message.key in queue.known:
                message.visible = 0.0
                queue.ready.append(message)

    def _now(self) -> float:
        return self.clock.now().timestamp()

    @staticmethod
    def _shown(message: _Message) -> dict[str, Any]:
        attributes = {"ApproximateReceiveCount": str(message.count)}
        if message.group:
            attributes["MessageGroupId"] = message.group
        return {
            "MessageId": message.key,
            "ReceiptHandle": message.receipt,
            "Body": message.body,
            "MD5OfBody": "",
            "Attributes": attributes,
            **message.more,
        }


def _failed(code: str, text: str = "") -> dict[str, Any]:
    return {"SenderFault": True, "Code": code, "Message": text}


@contextlib.contextmanager
def installed(fake: FakeSqs) -> Iterator[FakeSqs]:
    """Makes every SqsProducer open ``fake``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "airflow_broadway.producers.sqs.client.boto_client", lambda producer, env: fake
        )
        yield fake
