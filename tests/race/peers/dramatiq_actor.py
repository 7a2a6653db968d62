"""An actor, two processes of 64 threads, prefetch 128 each: a message is acknowledged after its
actor returns; actors that wait at the same time share a file."""

import os
import threading

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from writer import write

dramatiq.set_broker(RabbitmqBroker(url=os.environ["RACE_URL"]))
adding, writing = threading.Lock(), threading.Lock()
batches = [[]]


@dramatiq.actor(queue_name=os.environ["RACE_QUEUE"])
def store(row):
    with adding:
        mine = batches[-1]
        mine.append(row)
    with writing:
        if mine is batches[-1]:  # no other thread has written it
            with adding:
                batches[:] = [[]]
            write(mine)
