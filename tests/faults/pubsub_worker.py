"""A process that drains a Pub/Sub subscription run by run, and may be killed at any instant.

``python -m tests.faults.pubsub_worker FOLDER HOST SUBSCRIPTION DEAD LEASE MAX_MESSAGES KEYED
MESSAGES``: what ``rabbitmq_worker`` does, at another broker, until MESSAGES have come to an end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from airflow_broadway.producers.pubsub import PubSubProducer
from tests.faults.rabbitmq_worker import Worker
from tests.faults.receipt_worker import drain
from tests.pubsub_server import Remote


class PubSubWorker(Worker):
    """The runs of one subscription.

    :param keyed: Whether it delivers messages of one ordering key in order.
    """

    portion = 100

    def __init__(
        self,
        folder: Path,
        host: str,
        subscription: str,
        dead: str,
        lease: float,
        most: int,
        keyed: bool,
    ) -> None:
        self.folder = folder
        self.most = most
        self.producer = PubSubProducer(  # type: ignore[assignment]
            subscription=subscription,
            dead_letter=dead,
            message_ordering=keyed,
            lease=lease,
            receive_interval=0.1,
            receive_concurrency=4,
            max_number_of_messages=50,
            on_failure="retry",
            **Remote(host).options,
        )


def main() -> int:
    folder, host, subscription, dead, lease, most, keyed, messages = sys.argv[1:]
    worker = PubSubWorker(
        Path(folder), host, subscription, dead, float(lease), int(most), keyed == "keyed"
    )
    drain(worker, float(lease), int(messages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
