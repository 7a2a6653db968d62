"""Amazon SQS as a broker of the custody engine: leases are SQS's own visibility timeouts.

``adapter`` implements the port, with checks and depth.  ``dead_letters`` has their format and their
place.  ``client``, ``errors`` and ``limits`` are the way to AWS.  ``docs/sqs.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.sqs.options import SqsProducer

__all__ = ["SqsProducer"]
