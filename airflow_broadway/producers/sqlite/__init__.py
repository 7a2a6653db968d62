"""The embedded queue: durable, in one SQLite file; the reference of the custody protocol.

``database`` opens the file and translates its errors.  ``queue`` is the queue itself.  ``leases``
receives messages and carries out verdicts.  ``producer`` connects the queue to pipelines.
``docs/embedded-queue.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter
from airflow_broadway.producers.sqlite.producer import SqliteProducer
from airflow_broadway.producers.sqlite.queue import LeaseRecord, SqliteQueue

__all__ = ["Choice", "DeadLetter", "LeaseRecord", "SqliteProducer", "SqliteQueue"]
