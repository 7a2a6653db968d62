"""SQS in the fault runs: moto's server, in a process that the task kills do not reach."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.broker import DeadLetter
from tests.sqs_server import SqsServer


class Sqs:
    """The queue ``killed``, with a redrive policy to ``killed-dead`` that never takes effect."""

    stable_ids = True

    def __init__(self, folder: Path) -> None:
        self.server = SqsServer.start(folder / "sqs")
        self._client = self.server.client()
        self._dead = self.server.queue("killed-dead")
        arn = self._client.get_queue_attributes(QueueUrl=self._dead, AttributeNames=["QueueArn"])
        policy = {"deadLetterTargetArn": arn["Attributes"]["QueueArn"], "maxReceiveCount": 1000}
        self._url = self.server.queue("killed", RedrivePolicy=json.dumps(policy))

    def variables(self) -> Mapping[str, str]:
        return {"AIRFLOW_CONN_KILLED_SQS": json.dumps(self.server.connection())}

    def send(self, bodies: Sequence[bytes]) -> None:
        for start in range(0, len(bodies), 10):
            response = self._client.send_message_batch(
                QueueUrl=self._url,
                Entries=[
                    {"Id": str(place), "MessageBody": body.decode()}
                    for place, body in enumerate(bodies[start : start + 10])
                ],
            )
            assert not response.get("Failed")

    def waiting(self) -> int:
        return sum(self.server.depth(self._url))

    def leased(self) -> int:
        """Counts messages in flight, including scheduled retries: SQS does not separate them."""
        return self.server.depth(self._url)[1]

    def dead_letters(self) -> list[DeadLetter]:
        """Reads all dead letters; a repeated message id marks a duplicate."""
        letters: list[DeadLetter] = []
        receipts: list[str] = []
        seen: set[str] = set()
        while messages := self._client.receive_message(
            QueueUrl=self._dead,
            MaxNumberOfMessages=10,
            MessageAttributeNames=["All"],
            VisibilityTimeout=3600,
        ).get("Messages"):
            for message in messages:
                attributes = {
                    name: value["StringValue"]
                    for name, value in message["MessageAttributes"].items()
                }
                letters.append(
                    DeadLetter(
                        int(message["Body"]),
                        int(attributes["broadway_attempt"]),
                        attributes["broadway_reason"],
                        marked=attributes["broadway_message_id"] in seen,
                    )
                )
                seen.add(attributes["broadway_message_id"])
                receipts.append(message["ReceiptHandle"])
        for receipt in receipts:
            self._client.change_message_visibility(
                QueueUrl=self._dead, ReceiptHandle=receipt, VisibilityTimeout=0
            )
        return letters

    def close(self) -> None:
        self.server.stop()
