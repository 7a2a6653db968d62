"""What the workers that are killed have in common at a broker of receipts: SQS, Pub/Sub."""

from __future__ import annotations

import time

from airflow_broadway.core.errors import BroadwayError
from tests.faults.rabbitmq_worker import Worker

__all__ = ["drain"]


def drain(worker: Worker, lease: float) -> None:
    """Run after run, until the queue is empty.

    What nobody wrote down a receipt of is hidden for a lease: only then is it.
    """
    print("at work", flush=True)
    quiet = began = time.monotonic()
    while quiet - began <= lease + 2.0:
        try:
            worker.recover()
            if worker.run():
                began = time.monotonic()
        except BroadwayError as error:
            print(type(error).__name__, error, flush=True)
        time.sleep(0.1)
        quiet = time.monotonic()
