"""What one generation receives with, over all its connections."""

from __future__ import annotations

import secrets

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, Turns
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions
from airflow_broadway.producers.rabbitmq.receive.buffer import Buffer
from airflow_broadway.producers.rabbitmq.receive.bundler import Bundler
from airflow_broadway.producers.rabbitmq.receive.ids import Ids
from airflow_broadway.producers.rabbitmq.receive.lease import OpenLease


class Intake:
    """The parts that outlive a connection.

    :param env: Of the generation.
    """

    def __init__(self, options: RabbitMQOptions, env: ProducerEnv) -> None:
        self.options = options
        self.env = env
        self.journal = QueueJournal(env.staging, options.queue, env.shared)
        self.queues = StandingQueues(options, self.journal)
        self.buffer = Buffer()
        self.ids = Ids(secrets.token_hex(8))
        self.turns = Turns(self.journal)
        self.lease = OpenLease(env, options, self.queues)
        key = self.queues.names.key(env.generation)
        self.bundler = Bundler(self.lease, self.ids.prefix, key)
        limit = self.journal.limit()
        if limit is not None:
            self.bundler.fit(limit, refused=False)
