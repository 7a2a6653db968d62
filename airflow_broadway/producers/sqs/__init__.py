"""Amazon SQS as a broker of the custody engine: leases are SQS's own visibility timeouts.

``adapter`` implements the port.  ``admin`` has checks, depth and dead letters; ``dead_letters`` is
their format.  ``client``, ``errors`` and ``limits`` are the way to AWS.  ``docs/sqs.md`` is the
guide.
"""

from __future__ import annotations

from airflow_broadway.producers.sqs.options import SqsProducer

__all__ = ["SqsProducer"]
