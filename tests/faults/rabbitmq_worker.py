"""A process that drains a RabbitMQ queue run by run, and may be killed at any instant.

``python -m tests.faults.rabbitmq_worker FOLDER URI QUEUE LEASE MAX_MESSAGES`` ends with 0 once the
queue stays empty.  What an execution holds and has decided lies in files, as staging does it for a
real run: a lease, then a manifest with every message, then the report.  What an earlier process
left open is first released, or settled by its manifest.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker import standing_queues

#: A variable: queues are used as soon as they are declared, for nobody kills the broker.
YOUNG_QUEUES = "BROADWAY_YOUNG_QUEUES"

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "every seventh", "process")
AGAIN = Verdict(Action.RETRY, 0.0, "every third, once", "batch")


def verdict_on(number: int, attempt: int) -> Verdict:
    """What becomes of a message: its number and attempt say it."""
    if number % 3 == 0 and attempt == 1:
        return AGAIN
    return DEAD if number % 7 == 0 else ACK


class Worker:
    """The runs of one queue."""

    verdict_on = staticmethod(verdict_on)
    #: Messages of a receive.
    portion = 1000

    def __init__(self, folder: Path, uri: str, queue: str, lease: float, most: int) -> None:
        self.folder = folder
        self.most = most
        self.producer = RabbitMQProducer(
            queue=queue, uri=uri, lease=lease, reconnect_timeout=20.0, on_failure="retry"
        )

    def env(self, generation: str) -> ProducerEnv:
        owner = {"dag_id": "faults", "run_id": generation, "task_id": "p", "map_index": 0}
        return ProducerEnv(
            generation=generation, owner=owner, staging=f"file://{self.folder}/staging"
        )

    def recover(self) -> None:
        """Settle or release what earlier processes left open."""
        for place in sorted(self.folder.glob("runs/*")):
            if (place / "report.json").exists() or not (place / "lease.json").exists():
                continue
            if (place / "manifest.json").exists():
                self.settle(place)
            else:
                lease = Lease.from_json(json.loads((place / "lease.json").read_text()))
                self._settle(place, lease, Settlement(rest=RELEASE))

    def run(self) -> int:
        """Take, note, settle; how many messages."""
        generation = uuid.uuid4().hex
        source = self.producer.source(self.env(generation))
        place = self.folder / "runs" / generation
        try:
            place.mkdir(parents=True)
            write(place / "lease.json", source.lease.to_json())
            messages: list[Message] = []
            while len(messages) < self.most:
                wanted = self.most - len(messages)
                got = source.secure(source.receive(min(self.portion, wanted), timeout=1.0))
                if not got:
                    break
                self.take(place, got)
                messages += got
            lease = source.lease.to_json()
            write(
                place / "manifest.json", {"lease": lease, "messages": [noted(m) for m in messages]}
            )
        finally:
            source.close()
        self.settle(place)
        return len(messages)

    def drain(self) -> int:
        """Run until two runs in a row have received nothing; returns 0."""
        print("at work", flush=True)
        quiet = 0
        while quiet < 2:
            try:
                self.recover()
                quiet = 0 if self.run() else quiet + 1
            except BroadwayError as error:
                print(type(error).__name__, error, flush=True)
                time.sleep(0.3)
        return 0

    def take(self, place: Path, messages: Sequence[Message]) -> None:
        """What callbacks would do with messages, before any manifest names them."""

    def settle(self, place: Path) -> None:
        """Settle by the manifest."""
        manifest = json.loads((place / "manifest.json").read_text())
        entries = [self.entry_of(value) for value in manifest["messages"]]
        settlement = Settlement(
            rest=ACK,
            entries=lambda: (e for e in entries if e.verdict is not ACK),
            everything=lambda: iter(entries),
            expected=len(entries),
        )
        self._settle(place, Lease.from_json(manifest["lease"]), settlement)

    def entry_of(self, value: list[Any]) -> Entry:
        """The verdict on a message of a manifest."""
        message_id, attempt, _, payload, properties, receipt = value
        body = b64decode(payload)
        verdict = self.verdict_on(int(body), attempt)
        return Entry(message_id, receipt, verdict, attempt, body, properties)

    def _settle(self, place: Path, lease: Lease, settlement: Settlement) -> None:
        custodian = self.producer.custodian(self.env(lease.generation))
        try:
            report: SettleReport = custodian.settle(lease, settlement)
        finally:
            custodian.close()
        write(place / "report.json", report.to_json())


def noted(message: Message) -> list[Any]:
    """A message as the manifest keeps it."""
    data = message.acknowledger.data
    return [
        message.message_id,
        message.attempt,
        message.redelivered,
        b64encode(message.data).decode(),
        data.properties,
        data.receipt,
    ]


def write(path: Path, value: object) -> None:
    """Write a file whole."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(value))
    os.replace(draft, path)


def main() -> int:
    folder, uri, queue, lease, most = sys.argv[1:]
    if YOUNG_QUEUES in os.environ:
        standing_queues._RELIABLE_AGE = 0.0
    worker = Worker(Path(folder), uri, queue, float(lease), int(most))
    return worker.drain()


if __name__ == "__main__":
    sys.exit(main())
