"""RabbitMQ: custody stays with the broker, in bundles.

``options`` declares the options.  ``producer`` opens the source (``receive``), which secures
messages in bundles before it returns them, and the custodian (``settle``), which carries out
verdicts.  Both manage their queues through ``broker`` and use RabbitMQ through ``amqp``.  Each
persisted format has a module of its own: ``bundle``, ``marks``, ``journal``.  The guide is
``docs/rabbitmq.md``.
"""

from __future__ import annotations

from airflow_broadway.producers.rabbitmq.options import Qos
from airflow_broadway.producers.rabbitmq.producer import RabbitMQProducer

__all__ = ["Qos", "RabbitMQProducer"]
