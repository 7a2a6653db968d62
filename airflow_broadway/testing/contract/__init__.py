"""The custody contract, as a test suite that every producer passes.

The author of a producer inherits it and gives it a harness::

    class MyHarness(Harness):
        def producer(self):
            return MyProducer(path=self.arguments[0], lease=self.lease)

        def send(self, bodies):
            MyQueue(self.arguments[0]).send(bodies)


    class TestMyProducer(CustodyContract):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(str(tmp_path))

One that sets messages aside inherits ``DeadLettersContract`` too.  ``docs/producers.md`` is the
guide.  pytest must be installed.
For readable failures the suite's own ``conftest.py`` says
``pytest.register_assert_rewrite("airflow_broadway.testing.contract")``.
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

__all__ = [
    "CustodyContract",
    "DeadLettersContract",
    "Harness",
    "entry_of",
    "ids",
    "settlement_of",
]


class CustodyContract(Killing, Traffic, Lapsing, Redelivery, Settling, Receiving):
    """What every producer promises; a subclass gives the ``harness`` fixture."""
