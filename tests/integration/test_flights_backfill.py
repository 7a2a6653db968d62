"""January 2013 of the flights, backfilled by Airflow's own command through a real scheduler.

``DAYS=31 make test-all ARGS="-k test_flights_backfill"`` is the whole month; the default is three
days.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env, home_of
from scripts.load_flights import flights, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.integration.backfills.truth import rows_of, written
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

DAG = "kept_flights"
DAYS = int(os.environ.get("DAYS", "3"))


@pytest.mark.timeout(7200)
def test_every_day_is_correct_after_every_backfill(tmp_path):
    last = f"2013-01-{DAYS:02d}"
    sent = list(takewhile(lambda flight: flight["month"] == 1, flights()))
    sent = [flight for flight in sent if flight["time_hour"][:10] <= last]
    random.Random(7).shuffle(sent)
    truth = rows_of(sent)
    late, sent = sent[:50], sent[50:]
    queue, output = tmp_path / "queue.db", tmp_path / "rows"

    with airflow_of(tmp_path) as airflow:
        # Given live runs that received them in random order
        with SqliteQueue(queue, "flights") as flights_queue:
            load(flights_queue, sent)
        for max_messages in (len(sent) // 2, None):
            live(airflow, **({} if max_messages is None else {"max_messages": max_messages}))
        assert written(output) == rows_of(sent)

        # When the days are backfilled, two at a time, next to a live run, and one is unreadable
        with SqliteQueue(queue, "flights") as flights_queue:
            load(flights_queue, late)
        with damaged(tmp_path / "staging", last):
            backfill(airflow, "2013-01-01", last, "--max-active-runs", "2")
            run = airflow.trigger(DAG)
            assert airflow.wait_for_run(DAG, run, timeout=900) == "success"
            runs = wait_for_backfill(airflow, DAYS)

        # Then that day fails and keeps its rows; no row of the others is lost
        failed = {run["dag_run_id"] for run in runs if run["state"] == "failed"}
        assert {day_of(run) for run in runs if run["dag_run_id"] in failed} == {last}
        backfilled = {run["dag_run_id"] for run in runs}
        result = written(output)
        assert {row for day in result.values() for row in day} >= {
            row for day in rows_of(sent).values() for row in day
        }

        # And it alone is run again with ``failed``, and no day with ``none``
        for behavior, expected in (("failed", failed), ("none", set())):
            before = starts(runs)
            backfill(airflow, "2013-01-01", last, "--reprocess-behavior", behavior)
            runs = wait_for_backfill(airflow, DAYS)
            assert {run["state"] for run in runs} == {"success"}
            assert {run for run, date in starts(runs).items() if date != before[run]} == expected
        assert written(output)[last] == truth[last]

        # And all successful runs are run again backwards with ``completed``
        options = ("--run-backwards", "--reprocess-behavior", "completed")
        backfill(airflow, "2013-01-01", last, *options)
        runs = wait_for_backfill(airflow, DAYS)
        assert {run["state"] for run in runs} == {"success"}
        assert {run["dag_run_id"] for run in runs} == backfilled
        assert written(output) == truth

        # And a past run is repeated, with the same result
        again = airflow.trigger(DAG, {"source": "run", "source_run": min(backfilled)})
        assert airflow.wait_for_run(DAG, again, timeout=300) == "success"
        assert written(output) == truth


@contextmanager
def damaged(staging: Path, day: str) -> Iterator[None]:
    """Damages a file of one day of the archive meanwhile."""
    path = min(staging.glob(f"KeptFlights/_archive/date={day}/hour=*/*.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    yield
    path.write_bytes(content)


def day_of(run: dict[str, Any]) -> str:
    return str(run["data_interval_start"])[:10]


def starts(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the latest start of each run."""
    return {run["dag_run_id"]: str(run["start_date"]) for run in runs}


@contextmanager
def airflow_of(folder: Path) -> Iterator[LocalAirflow]:
    env = airflow_env(
        home=home_of(ROOT, "airflow-test-backfills"),
        port=free_port(),
        dags=ROOT / "tests" / "integration" / "backfills" / "dags",
        settings={"broadway.staging": f"file://{folder / 'staging'}"},
    )
    connection = {"conn_type": "broadway_sqlite", "host": str(folder / "queue.db")}
    env["AIRFLOW_CONN_FLIGHTS_QUEUE"] = json.dumps(connection)
    env["AIRFLOW_VAR_FLIGHTS_OUTPUT"] = str(folder / "rows")
    parts = ("api-server", "scheduler", "dag-processor")
    with LocalAirflow(env, folder / "logs", components=parts) as airflow:
        airflow.wait_for_dag(DAG)
        yield airflow


def live(airflow: LocalAirflow, **params: Any) -> None:
    run = airflow.trigger(DAG, params)
    assert airflow.wait_for_run(DAG, run, timeout=900) == "success"


def backfill(airflow: LocalAirflow, start: str, end: str, *more: str) -> None:
    dates = ("--from-date", start, "--to-date", end)
    command = ("airflow", "backfill", "create", "--dag-id", DAG, *dates, *more)
    # Airflow's own database is SQLite here.  The command creates a month of runs slowly, fails when
    # another run writes meanwhile, and leaves or removes its files.
    writers = ("scheduler", "dag-processor")
    for name in writers:
        process = airflow.processes.pop(name)
        process.terminate()
        process.wait(60)
    done = subprocess.run(command, env=airflow.env, capture_output=True, text=True, check=False)
    for name in writers:
        airflow.start_component(name)
    airflow.wait_healthy()
    assert done.returncode == 0, done.stdout + done.stderr


def wait_for_backfill(airflow: LocalAirflow, days: int) -> list[dict[str, Any]]:
    """Waits until the backfill's runs are over; returns them."""

    def runs() -> list[dict[str, Any]]:
        response = airflow.api("GET", f"/dags/{DAG}/dagRuns", run_type="backfill", limit=100)
        dag_runs: list[dict[str, Any]] = response["dag_runs"]
        return dag_runs

    def is_over() -> bool:
        done = [run for run in runs() if run["state"] in ("success", "failed")]
        return len(done) == days and not _is_open(airflow)

    eventually(is_over, timeout=3600)
    return runs()


def _is_open(airflow: LocalAirflow) -> bool:
    """Returns whether a backfill is not completed."""
    response = airflow.api("GET", "/backfills", dag_id=DAG)
    return any(item["completed_at"] is None for item in response["backfills"])
