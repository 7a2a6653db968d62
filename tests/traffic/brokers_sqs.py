"""SQS in the traffic tests: ``SendMessageBatch`` confirms the messages that it reports successful.

Draining advances the clock of moto's server past the longest visibility timeout.  Messages that are
visible only then were leased.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.contract.sqs_harness import SharedClock
from tests.sqs_server import SqsServer
from tests.traffic.brokers import DEAD, LEASE, QueuedMessage
from tests.traffic.publisher import body_of, number_of

#: Number of message groups of a FIFO queue.
_GROUPS = 16
#: Seconds after which a retry is visible, and after which every message is.
_SHORT, _LONG = 1.5, 43_300.0


class _Sender:
    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._fifo = url.endswith(".fifo")

    def send(self, numbers: Sequence[int]) -> Iterator[int]:
        for start in range(0, len(numbers), 10):
            entries = [self._entry(number) for number in numbers[start : start + 10]]
            response = self._client.send_message_batch(QueueUrl=self._url, Entries=entries)
            yield from (int(entry["Id"]) for entry in response.get("Successful", ()))

    def _entry(self, number: int) -> dict[str, str]:
        entry = {"Id": str(number), "MessageBody": body_of(number).decode()}
        if self._fifo:
            entry |= {
                "MessageGroupId": str(number % _GROUPS),
                "MessageDeduplicationId": str(number),
            }
        return entry

    def close(self) -> None:
        self._client.close()


class SqsTraffic:
    """A queue and its dead-letter queue.

    :param clock: The file of the server's clock.
    """

    kind = "sqs"

    def __init__(self, server: SqsServer, clock: str, *, fifo: bool = False) -> None:
        self._server = server
        self._clock = SharedClock(clock)
        self._fifo = fifo
        name, suffix = f"traffic-{uuid.uuid4().hex[:12]}", ".fifo" if fifo else ""
        attributes = {"FifoQueue": "true"} if fifo else {}
        self._url = server.queue(f"{name}{suffix}", **attributes)
        self._dead = server.queue(f"{name}-dead{suffix}", **attributes)
        self._moved = False
        self.options: Mapping[str, Any] = {"queue_url": self._url, "dead_letter": self._dead}
        self.connections = {"traffic": self._connection(server.url)}

    def address(self) -> tuple[str, int]:
        """Returns host and port of the server."""
        return "127.0.0.1", self._server.port

    def use_proxy(self, port: int) -> None:
        """Makes the next runs connect to the proxy at this port."""
        self.connections = {"traffic": self._connection(f"http://127.0.0.1:{port}")}

    def _connection(self, url: str) -> dict[str, Any]:
        known = self._server.connection()
        return {**known, "extra": {**known["extra"], "endpoint_url": url}}

    def group_of(self, number: int) -> int | None:
        return number % _GROUPS if self._fifo else None

    def is_unlocked(self) -> bool:
        return True

    def sender(self) -> _Sender:
        return _Sender(self._server.client(), self._url)

    def expire_leases(self) -> None:
        time.sleep(_SHORT)  # lets the server finish the requests of a killed run
        self._clock.sleep(LEASE + 1.0)

    def drain(self) -> list[QueuedMessage]:
        time.sleep(_SHORT)
        messages = list(self._drain_queue(self._url, "source"))
        if not self._moved:
            self._moved = True
            self._clock.sleep(_LONG)
        messages += self._drain_queue(self._url, "leased")
        return [*messages, *self._drain_queue(self._dead, DEAD)]

    def _drain_queue(self, url: str, place: str) -> Iterator[QueuedMessage]:
        client = self._server.client()
        while messages := client.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=10,
            MessageSystemAttributeNames=["ApproximateReceiveCount"],
        ).get("Messages"):
            for message in messages:
                count = int(message["Attributes"]["ApproximateReceiveCount"])
                yield QueuedMessage(number_of(message["Body"]), place, count > 1)
            client.delete_message_batch(
                QueueUrl=url,
                Entries=[
                    {"Id": str(place), "ReceiptHandle": message["ReceiptHandle"]}
                    for place, message in enumerate(messages)
                ],
            )
