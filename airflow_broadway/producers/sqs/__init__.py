"""Amazon SQS: leases are SQS's own, held by receipts that this package writes down.

``producer`` has the options.  Receiving: ``source``, ``polling`` (several receives in flight),
``receiving`` (requests, messages).  Settling: ``custodian``, ``settling`` (from verdicts to
requests), ``bulk`` (requests of ten, in parallel), ``dead``.  ``book`` keeps receipts; ``client``
and ``errors`` are the way to AWS.  ``docs/sqs.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.sqs.producer import SqsProducer

__all__ = ["SqsProducer"]
