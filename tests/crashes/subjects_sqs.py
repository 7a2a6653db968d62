"""Pipelines over SQS, standard and FIFO: moto's server, with two queues and a clock for each case.

What is steady here and not in life: one receive at a time, and none that waits.  Receives side by
side take the messages in any order, so that no two runs were the same.
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
from airflow_broadway.testing.crashes.subject import Letter
from tests.crashes.aws_calls import Aws
from tests.crashes.over_receipts import OverReceipts, declared
from tests.crashes.subjects import MakeSubject
from tests.sqs_server import KEY, REGION, SqsServer

#: Groups of a FIFO queue.
_GROUPS = 3
#: Longer than all that a case lets pass: 14 days.
_RETENTION = "1209600"
_COUNTS = tuple(f"ApproximateNumberOfMessages{which}" for which in ("", "NotVisible", "Delayed"))


class Moto:
    """Where the queues are, and their clocks."""

    def __init__(self, url: str, clocks: Path) -> None:
        self.url = url
        self.clocks = clocks

    def client(self, service: str) -> Any:
        """A client of this process's own: a fork must not share its connections."""
        return _client(os.getpid(), service, self.url)


@cache
def _client(pid: int, service: str, url: str) -> Any:
    import boto3

    return boto3.session.Session().client(service, region_name=REGION, endpoint_url=url, **KEY)


@contextmanager
def moto() -> Iterator[Moto]:
    """A server that child processes find through the environment."""
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
def over_sqs(*, fifo: bool = False) -> Iterator[MakeSubject]:
    """Creates subjects over queues of one kind."""
    result = _Fifo if fifo else _Sqs
    with moto() as server:
        # What botocore reads of AWS's descriptions is read once, and the forks have it.
        env = ProducerEnv(pipeline="warm", generation="warm", index=0)
        boto_client(SqsProducer(queue_name="warm", conn_id=None, endpoint_url=server.url), env)
        dead_letters._WAIT_SECONDS = 0  # moto has one server to ask
        yield lambda pipeline, folder: result(pipeline, folder, server)


class _Sqs(OverReceipts):
    """A pipeline over a standard queue."""

    # Failures on record are kept for 16 days: longer than SQS keeps a message.
    permanent = r"^[^/]+/sqs/[^/]+/attempts/"
    suffix: ClassVar[str] = ""

    def __init__(self, pipeline: type[Broadway], folder: Path, server: Moto) -> None:
        super().__init__(pipeline, folder)
        self._server = server
        self._place = hashlib.md5(str(folder).encode()).hexdigest()[:12]
        self._ahead = 0.0
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
                **declared(self.pipeline.producer),
            )
        }

    def pass_time(self, seconds: float) -> None:
        self._ahead += seconds
        (self._server.clocks / self._place).write_text(str(self._ahead))

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        client = self._server.client("sqs")
        ids: list[str] = []
        for start in range(0, len(bodies), 10):
            entries = [self._entry(body.decode()) for body in bodies[start : start + 10]]
            answer = client.send_message_batch(QueueUrl=self._queue, Entries=entries)
            known = {entry["Id"]: entry["MessageId"] for entry in answer["Successful"]}
            ids += [known[entry["Id"]] for entry in entries]
        return ids

    def _entry(self, body: str) -> dict[str, str]:
        return {"Id": body, "MessageBody": body}

    def waiting(self) -> int:
        answer = self._server.client("sqs").get_queue_attributes(
            QueueUrl=self._queue, AttributeNames=["All"]
        )
        return sum(int(answer["Attributes"][name]) for name in _COUNTS)

    def letters(self) -> list[Letter]:
        client = self._server.client("sqs")
        result: list[Letter] = []
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

    def _letter(self, attributes: Mapping[str, Any], body: str) -> Letter:
        # A standard queue has a letter twice where a run was killed between its sending and its
        # original's deletion: this attribute identifies it.
        key, why = (attributes[f"broadway_{name}"] for name in ("message_id", "reason"))
        return Letter(key["StringValue"], True, why["StringValue"], body.encode())


class _Fifo(_Sqs):
    """A pipeline over a FIFO queue, whose messages are in three groups."""

    suffix = ".fifo"

    def _entry(self, body: str) -> dict[str, str]:
        group = str(int(body) % _GROUPS)
        return {**super()._entry(body), "MessageGroupId": group, "MessageDeduplicationId": body}

    def group_of(self, place: int) -> str:
        return str(place % _GROUPS)
