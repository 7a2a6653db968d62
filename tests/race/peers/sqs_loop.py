"""boto3, ten threads that receive ten messages each with a long poll of 1 second: a file for 1,000
messages, or for fewer after a round that was not full, then ``delete_message_batch``."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.config import Config
from writer import write

client = boto3.client(
    "sqs", endpoint_url=os.environ["RACE_URL"], config=Config(max_pool_connections=10)
)
url = client.get_queue_url(QueueName=os.environ["RACE_QUEUE"])["QueueUrl"]


def receive(_):
    response = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
    return response.get("Messages", [])


def delete(ten):
    entries = [
        {"Id": str(place), "ReceiptHandle": message["ReceiptHandle"]}
        for place, message in enumerate(ten)
    ]
    client.delete_message_batch(QueueUrl=url, Entries=entries)


with ThreadPoolExecutor(10) as pool:
    while True:
        batch = []
        for _ in range(10):
            received = [message for ten in pool.map(receive, range(10)) for message in ten]
            batch += received
            if len(received) < 100:
                break
        if batch:
            write([json.loads(message["Body"]) for message in batch])
            list(pool.map(delete, [batch[at : at + 10] for at in range(0, len(batch), 10)]))
