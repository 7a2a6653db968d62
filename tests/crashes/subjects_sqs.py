"""Subjects over SQS, standard and FIFO, at moto's server: two queues and a clock per case.

Unlike in production, there is one receive at a time, and none waits, so that all runs are the same.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from airflow_broadway import Broadway
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.sqs import SqsProducer, dead_letters
from airflow_broadway.producers.sqs.client import boto_client
from airflow_broadway.testing.crashes.interceptor import Boundary
from airflow_broadway.testing.crashes.subject import DeadLetter
from tests.crashes.aws_calls import Aws
from tests.crashes.receipt_subject import ReceiptSubject, common_options
from tests.crashes.subjects import MakeSubject
from tests.sqs_server import KEY, REGION, SqsServer

#: Number of message groups of a FIFO queue.
_GROUPS = 3
#: 14 days in seconds: longer than the simulated time of a case.
_RETENTION = "1209600"
_COUNTS = tuple(f"ApproximateNumberOfMessages{which}" for which in ("", "NotVisible", "Delayed"))


class Moto:
    """The address of moto's server, and the folder of its clock offsets."""

    def __init__(self, url: str, clocks: Path) -> None:
        self.url = url
        self.clocks = clocks

    def client(self, service: str) -> Any:
        """Returns a client that only this process uses: forks must not share connections."""
        return _client(os.getpid(), service, self.url)


@cache
def _client(pid: int, service: str, url: str) -> Any:
    import boto3

    return boto3.session.Session().client(service, region_name=REGION, endpoint_url=url, **KEY)


@contextmanager
def moto() -> Iterator[Moto]:
    """Starts moto's server; child processes find it through the environment."""
    result = {
        "AWS_ACCESS_KEY_ID": KEY["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEY["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": REGION,
    }
    with tempfile.TemporaryDirectory(prefix="crashes-moto-") as name:
        folder = Path(name)
        server = SqsServer(folder, command=("tests.crashes.moto_clocks", name))
        server.run()
        before = {name: os.environ.get(name) for name in (*result, "AWS_ENDPOINT_URL")}
        os.environ.update(result, AWS_ENDPOINT_URL=server.url)
        try:
            yield Moto(server.url, folder)
        finally:
            server.stop()
            for item, value in before.items():
                if value is None:
                    del os.environ[item]
                else:
                    os.environ[item] = value


@contextmanager
def open_subjects(*, fifo: bool = False) -> Iterator[MakeSubject]:
    """Yields a function that creates subjects over standard or FIFO queues."""
    result = _Fifo if fifo else _Sqs
    with moto() as server:
        # Loads botocore's service models once for all forks.
        env = ProducerEnv(pipeline="warm", generation="warm", index=0)
        boto_client(SqsProducer(queue_name="warm", conn_id=None, endpoint_url=server.url), env)
        dead_letters._WAIT_SECONDS = 0  # moto has one server
        yield lambda pipeline, folder: result(pipeline, folder, server)


class _Sqs(ReceiptSubject):
    """A pipeline over a standard queue."""

    # Recorded failures are kept for 16 days: longer than SQS keeps a message.
    permanent = r"^[^/]+/sqs/[^/]+/attempts/"
    suffix: ClassVar[str] = ""

    def __init__(self, pipeline: type[Broadway], folder: Path, server: Moto) -> None:
        super().__init__(pipeline, folder)
        self._server = server
        self._place = hashlib.md5(str(folder).encode()).hexdigest()[:12]
        self._clock_offset = 0.0
        attributes = {"MessageRetentionPeriod": _RETENTION}
        if self.suffix:
            attributes["FifoQueue"] = "true"
        client = server.client("sqs")
        self._queue, self._dead = (
            client.create_queue(
                QueueName=f"{self._place}-{name}{self.suffix}", Attributes=attributes
            )["QueueUrl"]
            for name in ("queue", "dead")
        )

    def close(self) -> None:
        client = self._server.client("sqs")
        for url in (self._queue, self._dead):
            client.delete_queue(QueueUrl=url)
        (self._server.clocks / self._place).unlink(missing_ok=True)

    def boundaries(self) -> list[Boundary]:
        return [Aws(self._place), *super().boundaries()]

    def overrides(self) -> Mapping[str, Any]:
        return {
            "producer": SqsProducer(
                queue_url=self._queue,
                dead_letter=self._dead,
                conn_id=None,
                region_name=REGION,
                lease=self.lease,
                receive_concurrency=1,
                wait_time_seconds=0,
                **common_options(self.pipeline.producer),
            )
        }

    def pass_time(self, seconds: float) -> None:
        self._clock_offset += seconds
        (self._server.clocks / self._place).write_text(str(self._clock_offset))

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        client = self._server.client("sqs")
        ids: list[str] = []
        for start in range(0, len(bodies), 10):
            entries = [self._entry(body.decode()) for body in bodies[start : start + 10]]
            response = client.send_message_batch(QueueUrl=self._queue, Entries=entries)
            ids_by_number = {entry["Id"]: entry["MessageId"] for entry in response["Successful"]}
            ids += [ids_by_number[entry["Id"]] for entry in entries]
        return ids

    def _entry(self, body: str) -> dict[str, str]:
        return {"Id": body, "MessageBody": body}

    def waiting(self) -> int:
        response = self._server.client("sqs").get_queue_attributes(
            QueueUrl=self._queue, AttributeNames=["All"]
        )
        return sum(int(response["Attributes"][name]) for name in _COUNTS)

    def letters(self) -> list[DeadLetter]:
        client = self._server.client("sqs")
        result: list[DeadLetter] = []
        while messages := client.receive_message(
            QueueUrl=self._dead, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            result += [
                self._letter(message["MessageAttributes"], message["Body"]) for message in messages
            ]
            entries = [
                {"Id": str(place), "ReceiptHandle": item["ReceiptHandle"]}
                for place, item in enumerate(messages)
            ]
            client.delete_message_batch(QueueUrl=self._dead, Entries=entries)
        return result

    def _letter(self, attributes: Mapping[str, Any], body: str) -> DeadLetter:
        # A kill between sending a dead letter and deleting its original duplicates the dead letter;
        # the attribute identifies it.
        key, reason = (attributes[f"broadway_{name}"] for name in ("message_id", "reason"))
        return DeadLetter(key["StringValue"], True, reason["StringValue"], body.encode())


class _Fifo(_Sqs):
    """A pipeline over a FIFO queue with three message groups."""

    suffix = ".fifo"

    def _entry(self, body: str) -> dict[str, str]:
        group = str(int(body) % _GROUPS)
        return {**super()._entry(body), "MessageGroupId": group, "MessageDeduplicationId": body}

    def group_of(self, place: int) -> str:
        return str(place % _GROUPS)
