"""The demo's flights, to a Delta Lake table: nothing but the sink is another."""

from __future__ import annotations

from dataclasses import replace

from airflow_broadway.sinks import DeltaTable
from flights_pipeline import Flights

__all__ = ["DeltaFlights"]

#: The table must exist; the DAG names its folder.
TABLE = DeltaTable(path="/tmp/delta-flights")


class DeltaFlights(Flights):
    batchers = {name: replace(batcher, sink=TABLE) for name, batcher in Flights.batchers.items()}
