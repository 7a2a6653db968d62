"""Broadway for Apache Airflow: drain message queues with Airflow and Spark, settling by outcome.

The names that a pipeline needs.  Standard library only: the Spark driver imports this package, too.
Producers are in ``airflow_broadway.producers``, operators in
``airflow_broadway.operators``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.model.acks import ack_immediately
from airflow_broadway.core.model.backlog import backlog
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.model.pipeline_options import (
    Archive,
    Batcher,
    Processors,
    RateLimiting,
    RetryPolicy,
)
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.run_source import Interval, RunSource
from airflow_broadway.core.model.sink import Rows
from airflow_broadway.core.version import __version__ as __version__
from airflow_broadway.pipeline import Broadway
from airflow_broadway.types import PythonBatch, SparkBatch

if TYPE_CHECKING:
    from airflow_broadway.spark.results import failed

if "airflow" in sys.modules:  # a Spark driver has none
    from airflow_broadway.adapters import versions as _versions  # noqa: F401 - refuses Airflow 2

__all__ = [
    "Archive",
    "BatchInfo",
    "BatchMode",
    "Batcher",
    "Broadway",
    "Interval",
    "Message",
    "Processors",
    "PythonBatch",
    "RateLimiting",
    "RetryPolicy",
    "Rows",
    "RunInfo",
    "RunSource",
    "SparkBatch",
    "Trigger",
    "ack_immediately",
    "backlog",
    "failed",
]


def __getattr__(name: str) -> Any:
    # Imported on demand; it needs no pyspark.
    if name == "failed":
        from airflow_broadway.spark.results import failed

        return failed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
