"""pika's ``BlockingConnection``, prefetch 20,000: a file for 10,000 messages or 1 second, then
``basic_ack(multiple=True)``."""

import json
import os

import pika
from writer import write

QUEUE = os.environ["RACE_QUEUE"]
connection = pika.BlockingConnection(pika.URLParameters(os.environ["RACE_URL"]))
channel = connection.channel()
channel.queue_declare(QUEUE, durable=True)
channel.basic_qos(prefetch_count=20_000)
rows, tags = [], []


def take(channel, method, properties, body):
    rows.append(json.loads(body))
    tags.append(method.delivery_tag)
    if len(rows) == 10_000:
        flush()


def flush():
    if rows:
        write(rows)
        channel.basic_ack(tags[-1], multiple=True)
        rows.clear()
        tags.clear()


def tick():
    flush()
    connection.call_later(1, tick)


channel.basic_consume(QUEUE, take)
tick()
channel.start_consuming()
