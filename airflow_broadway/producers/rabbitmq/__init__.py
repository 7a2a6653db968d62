"""RabbitMQ: custody stays with the broker, in bundles.

``options`` are declared, ``producer`` opens the two halves: ``receive``, which secures messages in
bundles before it hands them out, and ``settle``, which carries out verdicts.  Both see to their
queues by ``broker``, and talk to RabbitMQ by ``amqp``.  What is written down and read again has a
module each: ``bundle``, ``marks``, ``journal``.
``docs/rabbitmq.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.rabbitmq.options import Qos
from airflow_broadway.producers.rabbitmq.producer import RabbitMQProducer

__all__ = ["Qos", "RabbitMQProducer"]
