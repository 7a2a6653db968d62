"""Types of the ``messages`` of ``handle_batch``, for its annotation.

A DataFrame with ``engine="spark"``, a list with ``engine="python"``::

    def handle_batch(self, batcher: str, messages: SparkBatch, batch_info, context): ...

The base class has ``Any``, which both narrow.  Spark is not imported at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_broadway.core.model.message import Message

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as SparkBatch
else:
    SparkBatch = Any

PythonBatch = list[Message]

__all__ = ["PythonBatch", "SparkBatch"]
