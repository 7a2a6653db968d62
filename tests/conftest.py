"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kafka_fixtures import apache_kafka, kafka, kafka_mock
from tests.order import Together, longest_first
from tests.pubsub_fixtures import pubsub, pubsub_emulator, pubsub_stub
from tests.server_process import at_end

__all__ = ["apache_kafka", "kafka", "kafka_mock", "pubsub", "pubsub_emulator", "pubsub_stub"]

# Airflow and all that is collected stay for good: to walk through them as often as Python does by
# itself takes a tenth of the tests' time.
gc.set_threshold(20_000, 20, 20)

# The same examples each time, and no limit of time: a test never fails because a machine is busy.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def _own_home(worker: str) -> None:
    """Give a process that tests next to another an Airflow database of its own, made already.

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


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields a PostgreSQL server."""
    from tests.cluster.services import PostgreSQL, ServiceMissing

    try:
        server = PostgreSQL(tmp_path_factory.mktemp("pg") / "postgresql", "127.0.0.1")
    except ServiceMissing as error:
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Ends the servers of this process."""
    at_end.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files begin."""
    longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together | None:
    """Let the files that share a Spark session be tested by one process."""
    return Together(config, log) if config.getoption("dist") == "loadfile" else None
