"""SQS in the fault runs: moto's server in a process of its own, which no kill of a task reaches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.broker import Dead
from tests.sqs_server import SqsServer


class Sqs:
    """The queue ``killed``, whose redrive policy names ``killed-dead`` and never acts itself."""

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
            answer = self._client.send_message_batch(
                QueueUrl=self._url,
                Entries=[
                    {"Id": str(place), "MessageBody": body.decode()}
                    for place, body in enumerate(bodies[start : start + 10])
                ],
            )
            assert not answer.get("Failed")

    def waiting(self) -> int:
        return sum(self.server.depth(self._url))

    def leased(self) -> int:
        """Includes scheduled retries, which SQS does not tell apart."""
        return self.server.depth(self._url)[1]

    def dead(self) -> list[Dead]:
        """The mark of a second letter of one message is the id that stands in both."""
        letters: list[Dead] = []
        receipts: list[str] = []
        seen: set[str] = set()
        while messages := self._client.receive_message(
            QueueUrl=self._dead,
            MaxNumberOfMessages=10,
            MessageAttributeNames=["All"],
            VisibilityTimeout=3600,
        ).get("Messages"):
            for message in messages:
                why = {
                    name: value["StringValue"]
                    for name, value in message["MessageAttributes"].items()
                }
                letters.append(
                    Dead(
                        int(message["Body"]),
                        int(why["broadway_attempt"]),
                        why["broadway_reason"],
                        marked=why["broadway_message_id"] in seen,
                    )
                )
                seen.add(why["broadway_message_id"])
                receipts.append(message["ReceiptHandle"])
        for receipt in receipts:
            self._client.change_message_visibility(
                QueueUrl=self._dead, ReceiptHandle=receipt, VisibilityTimeout=0
            )
        return letters

    def close(self) -> None:
        self.server.stop()
