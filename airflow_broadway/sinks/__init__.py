"""Tables and folders of exactly-once rows: one module each, loaded when it is first named."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_broadway.sinks.delta import DeltaTable
    from airflow_broadway.sinks.iceberg import IcebergTable
    from airflow_broadway.sinks.parquet import ParquetFolder
    from airflow_broadway.sinks.postgres import PostgresTable

__all__ = ["DeltaTable", "IcebergTable", "ParquetFolder", "PostgresTable"]

_HOMES = {
    "DeltaTable": "airflow_broadway.sinks.delta",
    "IcebergTable": "airflow_broadway.sinks.iceberg",
    "ParquetFolder": "airflow_broadway.sinks.parquet",
    "PostgresTable": "airflow_broadway.sinks.postgres",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
