"""A task of celery-batches, two prefork processes: ``flush_every=10_000``, ``flush_interval=1``,
``acks_late=True``, a prefetch of 20,000 (``worker_prefetch_multiplier=10_000``)."""

import os

from celery import Celery
from celery_batches import Batches
from writer import write

app = Celery(broker=os.environ["RACE_URL"])
app.conf.update(
    task_acks_late=True,
    task_default_queue=os.environ["RACE_QUEUE"],
    task_ignore_result=True,
    worker_prefetch_multiplier=10_000,
)


@app.task(name="store", base=Batches, flush_every=10_000, flush_interval=1)
def store(requests):
    write([request.args[0] for request in requests])
