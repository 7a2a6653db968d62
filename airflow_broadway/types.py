"""What ``handle_batch`` gets as ``messages``, for its annotation.

Of an ``engine="spark"`` batcher a DataFrame, of an ``engine="python"`` one a list::

    def handle_batch(self, batcher: str, messages: SparkBatch, batch_info, context): ...

The base class says ``Any``, so either narrows it.  Nothing of Spark is imported at run time.
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
