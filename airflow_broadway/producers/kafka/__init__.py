"""Apache Kafka: a log, whose offsets are held and finished one by one.

Kafka keeps one number for a group and a partition.  Who holds which offsets, and what is finished
beyond that number, stands in a ``table`` in staging, which ``register`` changes by compare-and-set;
the number in Kafka is its mirror.

``options`` are declared, ``producer`` opens the halves.  Receiving: ``opening`` (what is found, and
refused, before anything is received), ``backfill``, ``source``, ``partition``, ``records`` (from
Kafka's messages to ours), ``silence`` (who says nothing).  Settling:
``custodian``, ``work`` (what is to be done), ``settling`` (what the table is then),
``dead_letters``.  ``client``, ``admin`` and ``errors`` are the way to the cluster, ``ranges`` are
sets of offsets.  ``docs/kafka.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.kafka.options import ClientConfig, FetchConfig
from airflow_broadway.producers.kafka.producer import KafkaProducer

__all__ = ["ClientConfig", "FetchConfig", "KafkaProducer"]
