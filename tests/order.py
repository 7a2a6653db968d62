"""In which order files of tests begin: with a few processes, the last to begin decides the end."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["LONGEST", "longest_first"]

_HERE = Path(__file__).parent

#: The files that take longest, from ``tests/``: they begin first, so that no process is left alone
#: with one of them in the end.  Every second one waits for a broker more than it computes.
LONGEST = (
    "faults/test_run_kills.py",
    "contract/test_rabbitmq.py",
    "integration/test_demo.py",
    "faults/test_rabbitmq.py",
    "integration/test_clicks.py",
    "living/test_living.py",
    "integration/test_dag_test.py",
    "integration/test_rabbitmq_stopping.py",
    "integration/test_bad_input.py",
    "integration/test_stopping.py",
    "integration/test_spark_job.py",
    "integration/test_rabbitmq_settling.py",
    "conformance/test_conformance.py",
    "integration/test_rabbitmq_connections.py",
    "dags/test_readme.py",
    "unit/staging/test_arrow_schema.py",
    "unit/test_imports.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests: those of the longest files come first, the others keep their order."""
    places = {_HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
