"""Amazon SQS as a broker of the custody engine: leases are SQS visibility timeouts.

``adapter`` implements the port, with checks and depth.  ``dead_letters`` defines the format of dead
letters and lists them.  ``client``, ``errors`` and ``limits`` wrap AWS.  ``docs/sqs.md`` is the
guide.
"""

from __future__ import annotations

from airflow_broadway.producers.sqs.options import SqsProducer

__all__ = ["SqsProducer"]
