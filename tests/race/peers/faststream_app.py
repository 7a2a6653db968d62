"""A subscriber, prefetch 10,000, ``AckPolicy.NACK_ON_ERROR``: a message is acknowledged after its
handler returns; handlers that wait within a tenth of a second share a file."""

import os

from async_group import Group
from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

broker = RabbitBroker(os.environ["RACE_URL"], default_channel=Channel(prefetch_count=10_000))
app = FastStream(broker)
group = Group()


@broker.subscriber(
    RabbitQueue(os.environ["RACE_QUEUE"], durable=True), ack_policy=AckPolicy.NACK_ON_ERROR
)
async def store(row: dict):
    await group.add(row)
