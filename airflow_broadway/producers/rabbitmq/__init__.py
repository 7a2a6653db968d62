"""RabbitMQ: custody stays with the broker, in bundles.

``producer`` has the options.  Receiving: ``source`` (the run's thread), ``intake`` (the
connection's), ``sealing``, ``lane`` and ``transfer`` (the confirm rule), ``wire`` (deliveries from
bytes), ``drain`` and ``returns`` (what came back).  Settling: ``custodian``, ``settling``,
``publisher``, ``getter``, ``sweep``.  Formats: ``bundle``, ``properties``, ``journal``.  Queues:
``queues``, ``topology``.  ``docs/rabbitmq.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.rabbitmq.options import Qos
from airflow_broadway.producers.rabbitmq.producer import RabbitMQProducer

__all__ = ["Qos", "RabbitMQProducer"]
