"""Test a pipeline in milliseconds: no Airflow, no Spark, no broker.

::

    from airflow_broadway.testing import test_message


    def test_a_late_flight_is_batched_as_delayed():
        tested = test_message(Flights, b'{"origin": "JFK", "dep_delay": 40}')
        assert [batch.batcher for batch in tested.batches] == ["delayed"]
        assert tested.failed == []

``docs/testing.md`` shows the rest.  The suite that every producer passes is
:class:`airflow_broadway.testing.contract.CustodyContract`; it needs pytest, the rest does not.
"""

from __future__ import annotations

from airflow_broadway.testing.clock import ManualClock
from airflow_broadway.testing.driver import PipelineDriver
from airflow_broadway.testing.dummy import AckCall, DummyProducer, RecordingAcknowledger
from airflow_broadway.testing.kit import Tested, test_batch, test_message

__all__ = [
    "AckCall",
    "DummyProducer",
    "ManualClock",
    "PipelineDriver",
    "RecordingAcknowledger",
    "Tested",
    "test_batch",
    "test_message",
]
