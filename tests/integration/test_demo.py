"""``make demo``, from the flights to the report, which is compared with the files it leaves.

The expected numbers of each run were counted in the data by hand, not by the demo.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deltalake
import psutil
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env, home_of
from tests.airflow_home import made_home
from tests.unit.spark.session import TABLES

pytestmark = [pytest.mark.airflow, pytest.mark.spark]


@dataclass(frozen=True)
class ExpectedCounts:
    """The expected counts of some flights, from the file's first one on.

    :param delayed: By airport.
    """

    flights: int
    never_departed: int
    on_time: int
    delayed: Mapping[str, int]

    @property
    def rows(self) -> int:
        return self.flights - self.never_departed


JANUARY = ExpectedCounts(27_004, 521, 21_565, {"EWR": 2_336, "JFK": 1_480, "LGA": 1_102})
WHOLE_YEAR = ExpectedCounts(336_776, 8_255, 257_747, {"EWR": 28_942, "JFK": 22_650, "LGA": 19_182})


@dataclass
class DemoResult:
    """A demo that has ended."""

    code: int
    text: str
    folder: Path
    expected: ExpectedCounts = WHOLE_YEAR

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.folder.with_suffix(".json").read_text()))

    @property
    def queue(self) -> SqliteQueue:
        return SqliteQueue(self.folder / "queue.db", "flights")

    def rows(self, *columns: str) -> Any:
        folder = self.folder / "output" / "flights"
        dataset = ds.dataset(folder, format="parquet", partitioning="hive")
        return dataset.to_table(columns=list(columns) or None)


def start(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    # One home for all tests here: its database is created once.
    home = made_home(home_of(ROOT, "airflow-test-demo"))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "scripts.demo"),
            *("--folder", str(folder), "--home", str(home), *arguments),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
    )


def run(folder: Path, *arguments: str, **env: str) -> DemoResult:
    process = start(folder, *arguments, **env)
    try:
        text, _ = process.communicate(timeout=800)
    finally:
        end(process)
    return DemoResult(process.returncode, text, folder)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(60)
    if process.stdout is not None:
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TABLES, reason="no jars of Delta Lake: scripts/setup.sh --tables")
def test_the_demo_commits_to_a_delta_table(tmp_path):
    done = run(tmp_path / "demo", "--sink", "delta", "--messages", str(JANUARY.flights))

    assert done.code == 0, done.text
    assert done.report["mistakes"] == []
    table = deltalake.DeltaTable(done.folder / "output" / "flights").to_pyarrow_table()
    assert table.num_rows == JANUARY.rows
    assert pc.count_distinct(table["message_id"]).as_py() == JANUARY.rows


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(JANUARY, id="january"),
        pytest.param(WHOLE_YEAR, id="every flight", marks=pytest.mark.slow),
    ],
)
def demo(request, tmp_path_factory):
    expected: ExpectedCounts = request.param
    arguments = [] if expected is WHOLE_YEAR else ["--messages", str(expected.flights)]
    return replace(run(tmp_path_factory.mktemp("flights") / "demo", *arguments), expected=expected)


@pytest.mark.timeout(900)
class TestFlights:
    """The first month, and the whole year, as in ``make demo``."""

    def test_the_demo_succeeds(self, demo):
        assert demo.code == 0, demo.text
        assert demo.report["mistakes"] == []

    def test_the_output_has_every_departed_flight_once(self, demo):
        rows = demo.rows("message_id")

        assert rows.num_rows == demo.expected.rows
        assert pc.count_distinct(rows["message_id"]).as_py() == demo.expected.rows

    def test_flights_are_routed_by_delay_and_grouped_by_airport(self, demo):
        rows = demo.rows("batcher", "origin", "dep_delay")
        delayed = rows.filter(pc.field("dep_delay") > 15)

        assert rows.num_rows - delayed.num_rows == demo.expected.on_time
        assert set(delayed["batcher"].to_pylist()) == {"delayed"}
        assert Counter(delayed["origin"].to_pylist()) == demo.expected.delayed
        assert Counter(rows["batcher"].to_pylist()) == {
            "delayed": sum(demo.expected.delayed.values()),
            "on_time": demo.expected.on_time,
        }

    def test_departure_is_schedule_and_delay(self, demo):
        rows = demo.rows("scheduled_at", "departed_at", "dep_delay")
        minutes: Any = pc.minutes_between(rows["scheduled_at"], rows["departed_at"])

        assert minutes.to_pylist() == rows["dep_delay"].to_pylist()

    def test_the_report_queries_the_table(self, demo):
        rows = demo.rows("origin", "batcher", "hour", "dep_delay").to_pylist()

        assert sum(result["flights"] for result in demo.report["results"]) == demo.expected.rows
        for result in demo.report["results"]:
            own = [row for row in rows if row["origin"] == result["airport"]]
            assert result["delayed"] == demo.expected.delayed[result["airport"]]
            late = [row["dep_delay"] for row in own if row["hour"] == result["worst_hour"]]
            assert result["worst_hour_mean_delay"] == round(sum(late) / len(late), 1)

    def test_each_batch_has_committed_once(self, demo):
        commits = list((demo.folder / "output" / "flights" / "_commits").iterdir())

        assert len(commits) == sum(result["batches"] for result in demo.report["batchers"].values())

    def test_only_flights_that_never_departed_are_dead_letters(self, demo):
        letters = demo.queue.dead_letters(limit=None)

        assert len(letters) == demo.expected.never_departed
        assert {letter.reason for letter in letters} == {"never departed"}
        assert {letter.attempt for letter in letters} == {1}
        assert all(json.loads(letter.body)["dep_delay"] is None for letter in letters)

    def test_the_queue_is_empty_and_no_lease_is_left(self, demo):
        depth = demo.queue.depth()

        assert (depth.ready, depth.delayed, depth.leased) == (0, 0, 0)
        assert demo.queue.leases() == []

    def test_the_report_accounts_for_every_message(self, demo):
        report = demo.report

        assert report["received"] == demo.expected.flights
        assert report["failed"] == demo.expected.never_departed
        assert sum(report["sum"].values()) == demo.expected.flights
        assert report["sum"]["acked"] == demo.expected.rows
        assert report["sum"]["dead_lettered"] == demo.expected.never_departed
        for result in report["batchers"].values():
            assert sum(result["triggers"].values()) == result["batches"]

    def test_the_report_is_printed(self, demo):
        for words in (
            "received",
            f"{demo.expected.flights:,}",
            "dead lettered",
            f"{demo.expected.never_departed:,}",
            "messages/s",
            "Try next",
        ):
            assert words in demo.text
        # Output that is not a terminal has no colours, and no redrawn lines.
        assert "\x1b" not in demo.text


@pytest.fixture
def interrupted(tmp_path):
    process = start(tmp_path / "demo", "--messages", "5000")
    yield process
    end(process)


@pytest.mark.timeout(300)
def test_ctrl_c_leaves_no_process_behind(interrupted):
    # Given a demo whose run has begun
    assert interrupted.stdout is not None
    for line in interrupted.stdout:
        if "Triggered" in line:
            break
    time.sleep(2.0)
    family = psutil.Process(interrupted.pid).children(recursive=True)
    assert family

    # When its user presses Ctrl-C
    interrupted.send_signal(signal.SIGINT)
    text = interrupted.stdout.read()
    code = interrupted.wait(60)

    # Then it is reported, and all processes it started have ended
    assert code == 130
    assert "Stopping Airflow" in text
    assert "Traceback" not in text
    assert [process for process in family if _is_alive(process)] == []


def _is_alive(process: psutil.Process) -> bool:
    # An orphan that has ended is a zombie until the machine's first process reaps it.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_missing_java_is_one_clear_error(tmp_path):
    done = run(tmp_path / "demo", JAVA_HOME="", PATH=str(tmp_path))

    assert done.code == 1
    assert done.text == (
        "\nThe demo failed: Spark needs Java, which is not installed: `make demo` installs it\n"
    )


@pytest.mark.slow
def test_make_help_ends(tmp_path):
    # Given an Airflow that never ran, and an empty queue
    env = airflow_env(home=tmp_path, base={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    env["AIRFLOW_CONN_FLIGHTS_QUEUE"] = json.dumps(
        {"conn_type": "broadway_sqlite", "host": str(tmp_path / "queue.db")}
    )
    subprocess.run(["airflow", "db", "migrate"], env=env, check=True, capture_output=True)
    done = subprocess.run(
        ["airflow", "dags", "test", "flights"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
