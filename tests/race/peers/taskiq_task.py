"""A task of taskiq-aio-pika, two worker processes, ``qos=10_000`` and as many async tasks,
``--ack-type when_executed``; tasks that wait within a tenth of a second share a file."""

import os

from async_group import Group
from taskiq_aio_pika import AioPikaBroker
from taskiq_aio_pika.queue import Queue

broker = AioPikaBroker(
    os.environ["RACE_URL"], qos=10_000, task_queues=[Queue(name=os.environ["RACE_QUEUE"])]
)
group = Group()


@broker.task(task_name="store")
async def store(row: dict):
    await group.add(row)
