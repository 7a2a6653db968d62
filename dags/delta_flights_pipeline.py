"""The demo's flights in a Delta Lake table: only the sink differs."""

from __future__ import annotations

from dataclasses import replace

from airflow_broadway.sinks import DeltaTable
from flights_pipeline import Flights

__all__ = ["DeltaFlights"]

#: The table must exist; the DAG names its folder.
TABLE = DeltaTable(path="/tmp/delta-flights")


class DeltaFlights(Flights):
    batchers = {name: replace(batcher, sink=TABLE) for name, batcher in Flights.batchers.items()}
