"""Which files of tests begin, and which of them go to one process.

With a few processes, the last file to begin decides the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

_HERE = Path(__file__).parent

#: The files that take longest, from ``tests/``: they begin first, so that no process is left alone
#: with one of them in the end.  Every second one waits for a broker more than it computes.
LONGEST = (
    "faults/test_run_kills.py",
    "contract/test_rabbitmq.py",
    "integration/test_demo.py",
    "faults/test_rabbitmq.py",
    "integration/test_clicks.py",
    "integration/test_spark_job.py",  # and what goes with it
    "traffic/test_traffic.py",
    "integration/test_dag_test.py",
    "integration/test_rabbitmq_stopping.py",
    "integration/test_bad_input.py",
    "integration/test_stopping.py",
    "integration/test_rabbitmq_settling.py",
    "integration/test_rabbitmq_connections.py",
    "dags/test_readme.py",
    "unit/test_imports.py",
)

#: Files whose tests share a Spark session: to start it takes long, and it is fast when it is warm.
ONE_SPARK = (
    "integration/test_spark_job.py",
    "contract/test_sinks.py",
    "conformance/test_conformance.py",
    "unit/staging/test_arrow_schema.py",
    "integration/test_spark_files.py",
    "integration/test_spark_hard.py",
)


#: A file whose tests share nothing, and take longer together than a process should.
SPREAD = "crashes/test_crashes.py"


class Together(LoadFileScheduling):  # type: ignore[misc]
    """``--dist loadfile``, but that the files of :data:`ONE_SPARK` go to one process, and each test
    of :data:`SPREAD` to any.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid)).removeprefix("tests/")
        if file == SPREAD:
            return nodeid
        return "one Spark" if file in ONE_SPARK else file


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests: those of the longest files come first, the others keep their order."""
    places = {_HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
