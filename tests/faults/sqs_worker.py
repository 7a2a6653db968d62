"""A process that drains an SQS queue run by run, and may be killed at any instant.

``python -m tests.faults.sqs_worker FOLDER ENDPOINT QUEUE LEASE MAX_MESSAGES MESSAGES``: what
``rabbitmq_worker`` does, at another broker, until MESSAGES have come to an end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from airflow_broadway.producers.sqs import SqsProducer
from tests.faults.rabbitmq_worker import Worker
from tests.faults.receipt_worker import drain
from tests.sqs_server import REGION


class SqsWorker(Worker):
    """The runs of one queue, whose dead letters go to ``dead-<queue>``."""

    def __init__(self, folder: Path, endpoint: str, queue: str, lease: float, most: int) -> None:
        self.folder = folder
        self.most = most
        self.producer = SqsProducer(  # type: ignore[assignment]
            queue_name=queue,
            conn_id=None,
            region_name=REGION,
            endpoint_url=endpoint,
            lease=lease,
            wait_time_seconds=0,
            receive_interval=0.1,
            receive_concurrency=4,
            on_failure="retry",
            dead_letter=f"dead-{queue}",
        )


def main() -> int:
    folder, endpoint, queue, lease, most, messages = sys.argv[1:]
    worker = SqsWorker(Path(folder), endpoint, queue, float(lease), int(most))
    drain(worker, float(lease), int(messages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
