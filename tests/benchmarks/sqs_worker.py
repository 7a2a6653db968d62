"""Measures the SQS stages once, in a separate process; prints the result as JSON.

``bare`` is boto3 alone: threads that receive and delete ten messages at a time.  ``ours`` is a
process stage and its settlement.  Both use an endpoint, or a stub inside botocore that responds
without sending, to measure the client's own CPU time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

from tests.benchmarks.figures import Measurement
from tests.benchmarks.receipt_stages import measure_work, serve, stages
from tests.sqs_server import KEY, REGION, Connections

PIPELINE = "tests.benchmarks.pipelines:SqsPipeline"
BODY = "x" * 200
#: The endpoint of the stub; no server listens there.
NOWHERE = "http://127.0.0.1:9"


class Requests:
    """Counts requests; as a stub, also responds to them.

    :param messages: The number of messages of the stub's queue; ``None`` sends requests.
    """

    def __init__(self, messages: int | None) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._stub = messages is not None
        self._answers = list(_receives(messages or 0))

    def install(self) -> None:
        """Intercepts the requests of all clients from now on."""
        from botocore import handlers

        handlers.BUILTIN_HANDLERS.append(("before-send.sqs", self))

    def __call__(self, request: Any, event_name: str, **_: Any) -> Any:
        with self._lock:
            self.count += 1
        return self._respond(request, event_name) if self._stub else None

    def _respond(self, request: Any, event_name: str) -> Any:
        from botocore.awsrequest import AWSResponse

        action = event_name.rpartition(".")[2]
        if action == "ReceiveMessage":
            with self._lock:
                response = self._answers.pop() if self._answers else b"{}"
        elif action == "DeleteMessageBatch":
            response = _DELETED[len(json.loads(request.body)["Entries"])]
        elif action == "GetQueueUrl":
            response = json.dumps({"QueueUrl": f"{NOWHERE}/1/bench"}).encode()
        else:
            response = b'{"Attributes": {}}'
        return AWSResponse(request.url, 200, _HEADERS, _Raw(response))


class _Raw(BytesIO):
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.getvalue()


_HEADERS = {"content-type": "application/x-amz-json-1.0"}
_DELETED = [
    json.dumps({"Successful": [{"Id": str(n)} for n in range(count)], "Failed": []}).encode()
    for count in range(11)
]


def _receives(messages: int) -> Iterator[bytes]:
    """Yields responses of ten messages each, with the size of SQS's responses."""
    for _ in range(0, messages, 10):
        report = [
            {
                "MessageId": str(uuid.UUID(bytes=os.urandom(16))),
                "ReceiptHandle": os.urandom(206).hex(),
                "MD5OfBody": os.urandom(16).hex(),
                "Body": BODY,
                "Attributes": {"ApproximateReceiveCount": "1"},
            }
            for _ in range(10)
        ]
        yield json.dumps({"Messages": report}).encode()


# -- boto3 alone -----------------------------------------------------------------------------------


def bare(
    requests: Requests, endpoint: str, queues: list[str], count: int, threads: int
) -> dict[str, Measurement]:
    """Drains one queue in a loop; receives all messages of another one, then deletes them."""
    import boto3
    from botocore.config import Config

    client = boto3.session.Session().client(
        "sqs",
        region_name=REGION,
        endpoint_url=endpoint,
        config=Config(max_pool_connections=threads),
        **KEY,
    )
    receipts: list[list[str]] = []

    def receive(url: str) -> list[str]:
        result = client.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=10,
            VisibilityTimeout=900,
            MessageSystemAttributeNames=["ApproximateReceiveCount"],
        )
        return [message["ReceiptHandle"] for message in result.get("Messages", ())]

    def delete(url: str, handles: list[str]) -> None:
        response = client.delete_message_batch(
            QueueUrl=url,
            Entries=[{"Id": str(n), "ReceiptHandle": item} for n, item in enumerate(handles)],
        )
        if response.get("Failed"):
            raise RuntimeError(f"not deleted: {response['Failed']}")

    def loop(_: int) -> None:
        delete(queues[0], receive(queues[0]))

    def gather(_: int) -> None:
        receipts.append(receive(queues[1]))

    def drop(handles: list[str]) -> None:
        delete(queues[1], handles)

    turns = range(count // 10)
    with ThreadPoolExecutor(threads) as pool:

        def run(work: Callable[[Any], None], given: Any) -> Callable[[], None]:
            def work_all() -> None:
                for _ in pool.map(work, given):
                    pass

            return work_all

        took = {
            "ceiling": measure_work(requests, count, run(loop, turns)),
            "ceiling.receive": measure_work(requests, count, run(gather, turns)),
            "ceiling.delete": measure_work(requests, count, run(drop, receipts)),
        }
    if sum(map(len, receipts)) != count:
        raise RuntimeError(f"received {sum(map(len, receipts))} of {count}")
    return took


# -- this package ----------------------------------------------------------------------------------


def ours(
    requests: Requests, endpoint: str, queues: list[str], count: int, threads: int, folder: str
) -> dict[str, Measurement]:
    """Measures the stages of a run over SQS."""
    import boto3  # noqa: F401 - loaded before the clock starts, as all that is loaded lazily

    options = {
        "queue_url": queues[0],
        "queue_name": None,
        "endpoint_url": endpoint,
        "receive_concurrency": threads,
    }
    return stages(requests, PIPELINE, options, folder, count, connections=Connections(endpoint))


def main() -> None:
    """Runs the measurement that the command line names."""
    arguments = json.loads(sys.argv[2])
    stub = arguments["endpoint"] == NOWHERE
    total = arguments["count"] * (2 if sys.argv[1] == "bare" else 1)
    requests = Requests(total if stub else None)
    requests.install()
    serve(requests, bare, ours)


if __name__ == "__main__":
    main()
