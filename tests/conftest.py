"""Settings of all tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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

# The same examples each time, and no limit of time: a test never fails because a machine is busy.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def _own_home(worker: str) -> None:
    """Give a process that tests beside another an Airflow database of its own, made already.

    Before Airflow is imported, which reads where it is.
    """
    home = Path(os.environ["AIRFLOW_HOME"])
    own = home.with_name(f"{home.name}-{worker}")
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    shutil.copy2(home / "airflow.db", own)
    os.environ["AIRFLOW_HOME"] = str(own)


if (
    "PYTEST_XDIST_WORKER" in os.environ
    and (Path(os.environ["AIRFLOW_HOME"]) / "airflow.db").exists()
):
    _own_home(os.environ["PYTEST_XDIST_WORKER"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files begin; the others keep their order."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
