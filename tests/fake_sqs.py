"""A boto3 client of SQS that keeps SQS's own rules, in memory and on any clock.

moto accepts receipts that SQS refuses; this one does not: only the newest receipt of a message
settles it, and only while the message is in flight.  ``answer`` lets a test put an answer, or an
error, in the place of any request's.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.clock import Clock, SystemClock

URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders"
_MOST = 43_200


def client_error(code: str, text: str = "", *, status: int = 400, action: str = "Any") -> Exception:
    """What botocore raises for an answer of this code."""
    from botocore.exceptions import ClientError

    answer: Any = {
        "Error": {"Code": code, "Message": text},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error: Exception = ClientError(answer, action)
    return error


class _Held:
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
        self.ready: deque[_Held] = deque()
        self.flying: list[tuple[float, int, _Held]] = []
        self.known: dict[str, _Held] = {}
        #: Receipt → message id.
        self.keys: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self.sent: list[dict[str, Any]] = []
        #: The receipts by which messages were deleted.
        self.deleted: set[str] = set()
        #: Of a FIFO queue: the attempt's id → its answer.
        self.attempts: dict[str, list[_Held]] = {}


class FakeSqs:
    """A client; every queue that is named is there.

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
        """Put messages into a queue."""
        queue = self.queue(url)
        for body in bodies:
            held = _Held(next(self._numbers), body, group, more)
            queue.known[held.key] = held
            queue.ready.append(held)

    def answers(self, action: str, given: dict[str, Any] | Exception) -> None:
        """Answer all requests of one action with this from now on."""
        self.answer = lambda asked, _: given if asked == action else None

    def waiting(self, url: str = URL) -> list[str]:
        """The bodies that a receive would find."""
        self._wake(self.queue(url))
        return [held.body for held in self.queue(url).ready]

    def left(self, url: str = URL) -> int:
        """Messages that have not been deleted."""
        return len(self.queue(url).known)

    # -- what boto3's client has ---------------------------------------------------------------

    def close(self) -> None:
        pass

    def receive_message(self, **arguments: Any) -> dict[str, Any]:
        given = self._given("ReceiveMessage", arguments)
        if given is not None:
            return given
        with self._lock:
            queue, now = self.queue(arguments["QueueUrl"]), self._now()
            self._wake(queue)
            busy: set[str] = set()
            if arguments["QueueUrl"].endswith(".fifo"):
                busy = {
                    held.group
                    for until, _, held in queue.flying
                    if held.group and held.visible == until and held.key in queue.known
                }
                queue.ready = deque(sorted(queue.ready, key=lambda held: held.place))
            again = queue.attempts.get(arguments.get("ReceiveRequestAttemptId", ""))
            if again is not None:  # the answer was lost: it is given once more
                return {"Messages": [self._shown(held) for held in again]}
            found: list[dict[str, Any]] = []
            later: list[_Held] = []
            while queue.ready and len(found) < arguments["MaxNumberOfMessages"]:
                held = queue.ready.popleft()
                if busy and held.group in busy:
                    later.append(held)
                    continue
                held.receipt = f"r{next(self._numbers)}"
                held.count += 1
                held.received = now
                self._hide(queue, held, now + arguments["VisibilityTimeout"])
                found.append(self._shown(held))
                if "ReceiveRequestAttemptId" in arguments:
                    attempt = arguments["ReceiveRequestAttemptId"]
                    queue.attempts.setdefault(attempt, []).append(held)
            queue.ready.extendleft(reversed(later))
            self._wake(queue)  # what was received with a visibility timeout of 0
            return {"Messages": found} if found else {}

    def delete_message_batch(self, **arguments: Any) -> dict[str, Any]:
        def delete(queue: _Queue, entry: dict[str, Any]) -> dict[str, Any] | None:
            receipt = entry["ReceiptHandle"]
            held = self._by_receipt(queue, receipt)
            if held is None:
                # Deleting once more by the same receipt is no error.
                return None if receipt in queue.deleted else _failed("ReceiptHandleIsInvalid")
            del queue.known[held.key]
            queue.deleted.add(receipt)
            return None

        return self._batch("DeleteMessage", arguments, delete)

    def change_message_visibility_batch(self, **arguments: Any) -> dict[str, Any]:
        now = self._now()

        def change(queue: _Queue, entry: dict[str, Any]) -> dict[str, Any] | None:
            held = self._by_receipt(queue, entry["ReceiptHandle"])
            if held is None:
                return _failed("ReceiptHandleIsInvalid")
            if held.visible <= now:
                return _failed("AWS.SimpleQueueService.MessageNotInflight")
            if now + entry["VisibilityTimeout"] > held.received + _MOST:
                text = "Total VisibilityTimeout for the message is beyond the limit [43200 seconds]"
                return _failed("InvalidParameterValue", text)
            self._hide(queue, held, now + entry["VisibilityTimeout"])
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
        given = self._given("GetQueueAttributes", arguments)
        return given or {"Attributes": dict(self.queue(arguments["QueueUrl"]).attributes)}

    def get_queue_url(self, **arguments: Any) -> dict[str, Any]:
        given = self._given("GetQueueUrl", arguments)
        return given or {"QueueUrl": URL.rpartition("/")[0] + "/" + arguments["QueueName"]}

    # -- rules ---------------------------------------------------------------------------------

    def _batch(
        self,
        action: str,
        arguments: dict[str, Any],
        each: Callable[[_Queue, dict[str, Any]], dict[str, Any] | None],
    ) -> dict[str, Any]:
        entries = arguments["Entries"]
        assert 1 <= len(entries) <= 10, "SQS takes up to ten entries"
        assert len({entry["Id"] for entry in entries}) == len(entries), "ids are distinct"
        given = self._given(action, arguments)
        if given is not None:
            return given
        failed, done = [], []
        with self._lock:
            self.entries[action] += len(entries)
            queue = self.queue(arguments["QueueUrl"])
            for entry in entries:
                error = each(queue, entry)
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
        given = self.answer(action, arguments)
        if isinstance(given, Exception):
            raise given
        answer: dict[str, Any] | None = given
        return answer

    def _by_receipt(self, queue: _Queue, receipt: str) -> _Held | None:
        key = queue.keys.get(receipt)
        held = queue.known.get(key) if key else None
        return held if held is not None and held.receipt == receipt else None

    def _hide(self, queue: _Queue, held: _Held, until: float) -> None:
        held.visible = until
        queue.keys[held.receipt] = held.key
        heapq.heappush(queue.flying, (until, next(self._numbers), held))

    def _wake(self, queue: _Queue) -> None:
        """Let messages be seen again whose time is over."""
        now = self._now()
        while queue.flying and queue.flying[0][0] <= now:
            until, _, held = heapq.heappop(queue.flying)
            if held.visible == until and held.key in queue.known:
                held.visible = 0.0
                queue.ready.append(held)

    def _now(self) -> float:
        return self.clock.now().timestamp()

    @staticmethod
    def _shown(held: _Held) -> dict[str, Any]:
        attributes = {"ApproximateReceiveCount": str(held.count)}
        if held.group:
            attributes["MessageGroupId"] = held.group
        return {
            "MessageId": held.key,
            "ReceiptHandle": held.receipt,
            "Body": held.body,
            "MD5OfBody": "",
            "Attributes": attributes,
            **held.more,
        }


def _failed(code: str, text: str = "") -> dict[str, Any]:
    return {"SenderFault": True, "Code": code, "Message": text}


@contextlib.contextmanager
def installed(fake: FakeSqs) -> Iterator[FakeSqs]:
    """Every SqsProducer opens ``fake`` while this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "airflow_broadway.producers.sqs.client.boto_client", lambda producer, env: fake
        )
        yield fake
