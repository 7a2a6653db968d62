"""Broadway for Apache Airflow: drain message queues with Airflow and Spark, settling by outcome."""

from __future__ import annotations

__version__ = "0.1.0"
