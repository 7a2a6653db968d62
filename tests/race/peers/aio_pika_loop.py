"""aio-pika's ``connect_robust``, prefetch 20,000: a file for 10,000 messages or 1 second, then
``ack(multiple=True)``."""

import asyncio
import json
import os

import aio_pika
from writer import write


async def main():
    connection = await aio_pika.connect_robust(os.environ["RACE_URL"])
    async with connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=20_000)
        queue = await channel.declare_queue(os.environ["RACE_QUEUE"], durable=True)
        messages = asyncio.Queue()
        await queue.consume(messages.put)
        while True:
            batch = [await messages.get()]
            try:
                async with asyncio.timeout(1):
                    while len(batch) < 10_000:
                        batch.append(await messages.get())
            except TimeoutError:
                pass
            await asyncio.to_thread(write, [json.loads(message.body) for message in batch])
            await batch[-1].ack(multiple=True)


asyncio.run(main())
