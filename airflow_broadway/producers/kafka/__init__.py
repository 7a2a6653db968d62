"""Apache Kafka: committed offsets of a consumer group, and a claim of each partition a run holds.

``options`` declares the options; ``producer`` opens source and custodian.  ``claims`` stores claims
as small files in staging, and as metadata of the committed offsets; ``settling`` defines a claim
and computes its end.  Receiving: ``opening`` (the start offset of each partition, or why a run is
refused; for backfills too), ``reader`` (one partition), ``source``, ``records`` (converts Kafka
records to messages).  Settling: ``custodian``, ``outbox`` (retries and dead letters).  ``client``
and ``errors`` connect to the cluster.  Commands and pages use ``inspect`` and ``letters``.
``docs/kafka.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.kafka.producer import KafkaProducer

__all__ = ["KafkaProducer"]
