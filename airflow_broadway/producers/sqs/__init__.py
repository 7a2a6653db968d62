"""Amazon SQS: leases are SQS's own, held by receipts that this package writes down.

``options`` are declared, ``producer`` opens the halves, which stand on ``kit.receipts``.
Receiving: ``source``, ``receives``, ``reading`` (from an answer to messages).  Settling:
``custodian``, ``settlement``, ``batch_requests`` (of ten entries), ``dead_letters``.  ``client``,
``errors`` and ``limits`` are the way to AWS.  ``docs/sqs.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.sqs.producer import SqsProducer

__all__ = ["SqsProducer"]
