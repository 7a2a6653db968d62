"""Arroyo's ``StreamProcessor``: ``BatchStep`` of 10,000 messages or 1 second, ``RunTask`` that
writes a file, ``CommitOffsets`` by the policy ``IMMEDIATE``; ``session.timeout.ms=6000``."""

import json
import os
import signal

from arroyo import Topic
from arroyo.backends.kafka import KafkaConsumer
from arroyo.backends.kafka.configuration import build_kafka_consumer_configuration
from arroyo.commit import IMMEDIATE
from arroyo.processing import StreamProcessor
from arroyo.processing.strategies import (
    BatchStep,
    CommitOffsets,
    ProcessingStrategyFactory,
    RunTask,
)
from writer import write


def store(message):
    write([json.loads(value.payload.value) for value in message.payload])


class Factory(ProcessingStrategyFactory):
    def create_with_partitions(self, commit, partitions):
        return BatchStep(10_000, 1.0, RunTask(store, CommitOffsets(commit)))


consumer = KafkaConsumer(
    build_kafka_consumer_configuration(
        {"session.timeout.ms": 6000},
        os.environ["RACE_QUEUE"],
        auto_offset_reset="earliest",
        bootstrap_servers=[os.environ["RACE_URL"]],
        enable_auto_commit=False,
    )
)
processor = StreamProcessor(consumer, Topic(os.environ["RACE_QUEUE"]), Factory(), IMMEDIATE)
signal.signal(signal.SIGTERM, lambda *_: processor.signal_shutdown())
processor.run()
