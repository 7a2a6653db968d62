"""Airflow's ``SqsSensor``, ``max_messages=10``, ``num_batches=10``, ``wait_time_seconds=0``,
``delete_message_on_reception=False``: a second task writes a file and deletes what was found.
Both tasks are executed in a loop in one process, in the scheduler's place."""

import json
import os

from airflow.providers.amazon.aws.sensors.sqs import SqsSensor
from writer import write

sensor = SqsSensor(
    task_id="receive",
    sqs_queue=os.environ["RACE_QUEUE"],
    aws_conn_id="race",
    max_messages=10,
    num_batches=10,
    wait_time_seconds=0,
    delete_message_on_reception=False,
)


def store(messages):
    write([json.loads(message["Body"]) for message in messages])
    for at in range(0, len(messages), 10):
        entries = [
            {"Id": message["MessageId"], "ReceiptHandle": message["ReceiptHandle"]}
            for message in messages[at : at + 10]
        ]
        sensor.hook.conn.delete_message_batch(QueueUrl=sensor.sqs_queue, Entries=entries)


class TaskInstance:
    def xcom_push(self, key, value):
        store(value)


sensor.sqs_queue = sensor.hook.conn.get_queue_url(QueueName=sensor.sqs_queue)["QueueUrl"]
while True:
    sensor.poke({"ti": TaskInstance()})
