"""A process that drains a Pub/Sub subscription run by run, and may be killed at any instant.

``python -m tests.faults.pubsub_worker FOLDER HOST SUBSCRIPTION DEAD LEASE MAX_MESSAGES KEYED``:
what ``rabbitmq_worker`` does, at another broker.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.pubsub import PubSubProducer
from tests.faults.rabbitmq_worker import Worker, verdict_on
from tests.pubsub_server import Remote

__all__ = ["PubSubWorker", "verdict_on"]


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
    folder, host, subscription, dead, lease, most, keyed = sys.argv[1:]
    worker = PubSubWorker(
        Path(folder), host, subscription, dead, float(lease), int(most), keyed == "keyed"
    )
    print("at work", flush=True)
    quiet = began = time.monotonic()
    # What nobody wrote down an id of is held for a lease: only then is the subscription empty.
    while quiet - began <= float(lease) + 2.0:
        try:
            worker.recover()
            if worker.run():
                began = time.monotonic()
        except BroadwayError as error:
            print(type(error).__name__, error, flush=True)
        time.sleep(0.1)
        quiet = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(main())
