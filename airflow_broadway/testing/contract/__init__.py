"""The custody contract as a test suite for producers.

A producer's test inherits the suite and provides a harness::

    class MyHarness(Harness):
        def producer(self):
            return MyProducer(path=self.arguments[0], lease=self.lease)

        def send(self, bodies):
            MyQueue(self.arguments[0]).send(bodies)


    class TestMyProducer(CustodyContract):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(str(tmp_path))

The test of a producer with dead letters inherits ``DeadLettersContract`` too.
``docs/producers.md`` is the guide.  pytest must be installed.  For readable failures call
``pytest.register_assert_rewrite("airflow_broadway.testing.contract")`` in ``conftest.py``.
"""

from __future__ import annotations

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.testing.contract.dead_letters import DeadLettersContract
from airflow_broadway.testing.contract.killing import Killing
from airflow_broadway.testing.contract.lapsing import Lapsing
from airflow_broadway.testing.contract.receiving import Receiving
from airflow_broadway.testing.contract.redelivery import Redelivery
from airflow_broadway.testing.contract.settling import Settling
from airflow_broadway.testing.contract.traffic import Traffic
from airflow_broadway.testing.harness import Harness, ids, settlement_of

__all__ = ["CustodyContract", "DeadLettersContract", "Harness", "entry_of", "ids", "settlement_of"]


class CustodyContract(Killing, Traffic, Lapsing, Redelivery, Settling, Receiving):
    """The contract of every producer; a subclass provides the ``harness`` fixture."""
