"""What the workers that are killed have in common at a broker of receipts: SQS, Pub/Sub."""

from __future__ import annotations

import time

from airflow_broadway.core.errors import BroadwayError
from tests.faults.rabbitmq_worker import Worker
from tests.faults.receipt_kills import ended

#: Leases for which an empty queue is looked at again while numbers are missing.  An answer that
#: came too late, on a busy machine, hides what it brought once more, and says so to nobody.
_PATIENCE = 4


def drain(worker: Worker, lease: float, messages: int) -> None:
    """Run after run, until the queue is empty and all that was in it has come to its end.

    What nobody wrote down a receipt of is hidden for a lease: so the last look begins later.

    :param messages: The numbers that must come to an end, from 0 on.
    """
    print("at work", flush=True)
    quiet = time.monotonic()
    while True:
        look = time.monotonic()
        try:
            worker.recover()
            if worker.run():
                quiet = time.monotonic()
        except BroadwayError as error:
            print(type(error).__name__, error, flush=True)
            quiet = time.monotonic()  # it may have taken some
        waited = look - quiet
        if waited > lease + 2.0 and (
            waited > _PATIENCE * lease or len(ended(worker.folder)) == messages
        ):
            return
        time.sleep(0.1)
