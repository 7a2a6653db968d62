"""Apache Kafka: plain consumer-group offsets, and a claim of each partition that a run holds.

``options`` are declared, ``producer`` opens the halves.  ``claims`` are small files in staging, and
marks beside the group's offsets; ``settling`` says what a claim is, and how it ends.  Receiving:
``opening`` (where a partition begins, or why it may not; of a backfill too), ``reader`` (one
partition), ``source``, ``records`` (from Kafka's messages to ours).  Settling: ``custodian``,
``outbox`` (retries and dead letters).  ``client`` and ``errors`` are the way to the cluster.  For
people: ``inspect`` and ``letters``.  ``docs/kafka.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.kafka.producer import KafkaProducer

__all__ = ["KafkaProducer"]
