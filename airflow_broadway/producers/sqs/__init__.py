"""Amazon SQS: leases are SQS's own, held by receipts that this package writes down.

``options`` are declared, ``producer`` opens the halves.  Receiving: ``source``, ``polling``
(several receives in flight), ``reading`` (from an answer to messages).  Settling: ``custodian``,
``settlement`` (from verdicts to requests), ``batch_requests`` (of ten entries, several at a time),
``dead_letters``.  ``receipts`` and ``failures`` are kept in staging; ``client``, ``errors`` and
``limits`` are the way to AWS.  ``docs/sqs.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.sqs.producer import SqsProducer

__all__ = ["SqsProducer"]
