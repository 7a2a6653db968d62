"""The archive's table: commands, other engines, concurrent and killed writers, buckets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable

from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.archive import table
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.archive.table import archive_folder, maintain
from airflow_broadway.staging.store import Folder, Store
from scripts.airflow_env import ROOT
from scripts.local_airflow import free_port
from tests.cli_runs import ran
from tests.unit.runs.archive_appends import NOW, append_message
from tests.unit.runs.archive_steps import NINE, World, of_minutes

NINE_TO_TEN = ("--start", "2013-01-01T09:00:00Z", "--end", "2013-01-01T10:00:00")
TABLE = "airflow_broadway.staging.archive.table"


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def run(world, capsys):
    """Runs a command; returns its exit code and all that it printed, or its JSON."""

    def run(action: str, *arguments: str) -> Any:
        flags = ("--pipeline-name", "Minutes", "--staging", world.store.uri)
        result = ran(capsys, "archive", action, *flags, *arguments)
        return result.json if "--json" in arguments else (result.code, result.out + result.err)

    return run


def test_list_groups_by_day_and_hour(world, run):
    world.store.root_id()
    assert run("list")[0] == 2  # no pipeline of this name has run
    world.live(3, 1, 61)

    assert run("list", "--json") == [{"time": "2013-01-01", "hours": 2, "files": 2, "messages": 3}]
    assert [row["messages"] for row in run("list", "--json", "--hours")] == [2, 1]
    assert [row["messages"] for row in run("list", "--json", *NINE_TO_TEN)] == [2]


def test_purge_removes_hours_and_is_reported(world, run):
    world.live(1, 2, 61)
    odd = ("--start", "2013-01-01T09:00:00Z", "--end", "2013-01-01T09:30:00Z")

    assert "use --yes to remove" in run("purge", *NINE_TO_TEN)[1]
    assert "is not the beginning of an hour" in run("purge", "--yes", *odd)[1]
    assert run("purge", "--json", "--yes", *NINE_TO_TEN) == {"hours": 1, "messages": 2}

    assert look(world.archive).messages == 1
    report = world.run("again", of_minutes(0, 120)).all()
    assert "some of it was removed" in "; ".join(report["notes"])
    run(
        "purge",
        "--json",
        "--yes",
        "--start",
        "2013-01-01T10:00:00Z",
        "--end",
        "2013-01-02T00:00:00Z",
    )
    assert list(folder_of(world).glob("date=*/hour=*/*")) == []
    assert look(world.archive).removed == (Interval(NINE, datetime(2013, 1, 2, tzinfo=UTC)),)


def test_expired_hours_are_removed_by_a_later_run(tmp_path):
    world = World(tmp_path, archive={"keep": 3600.0})
    world.live(1)
    assert look(world.archive).messages == 1

    world.run("later").process()

    assert look(world.archive).messages == 0
    report = world.backfill("again")
    assert "some of it was removed, by retention" in "; ".join(report["notes"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--start", "noon", "--end", "2013-01-01"), "--start: expected a timestamp in ISO 8601"),
        (("--start", "2013-01-02", "--end", "2013-01-01"), "is to be before --end"),
        (("--start", "2013-01-02"), "use both --start and --end"),
    ],
)
def test_invalid_interval_is_refused(world, run, arguments, error):
    world.minutes(1)
    world.run("live").process()
    code, out = run("list", *arguments)
    assert (code, error in out) == (2, True)


# -- other engines ---------------------------------------------------------------------------------


def folder_of(world: World) -> Path:
    return Path(world.store.root, world.archive.path)


def test_other_engines_read_the_table(world):
    world.live(3, 1, 61)
    world.live(2, run_id="more")

    table = DeltaTable(folder_of(world)).to_pyarrow_table(filters=[("hour", "=", 9)])

    rows = {json.loads(row["payload"])["minute"]: row for row in table.to_pylist()}
    assert rows.keys() == {1, 2, 3}
    assert rows[3]["time"] == NINE + timedelta(minutes=3)
    assert (rows[3]["date"], rows[3]["hour"]) == (date(2013, 1, 1), 9)
    assert (rows[3]["source"], rows[3]["attempt"], rows[3]["was"]) == ("sqlite", 1, None)


def test_files_of_other_engines_make_the_same_batches(world):
    # Given hours of several executions, one of which another engine has written anew
    for minutes in ((9, 1), (8, 2), (7, 61), (3, 62), (4, 5)):
        world.live(*minutes, run_id=f"live{minutes[0]}")
    world.run("first", of_minutes(0, 120)).all()
    DeltaTable(folder_of(world)).update(updates={"source": "'other'"})

    world.run("second", of_minutes(0, 120)).all()

    first, second = world.sink("first"), world.sink("second")
    assert [batch["batch_id"] for batch in first] == [batch["batch_id"] for batch in second]
    assert [len(batch["rows"]) for batch in second] == [4, 4, 2]


# -- concurrent and killed writers -----------------------------------------------------------------


def appending(store: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.unit.runs.archive_appends", store]
    return subprocess.Popen([*command, *map(str, arguments)], cwd=ROOT)


def generations_in(archive: Any) -> list[str]:
    paths = [path for files in look(archive).hours.values() for path in files]
    return sorted(Path(path).name[:32] for path in paths)


@pytest.mark.parametrize("item", [15, pytest.param(250, marks=pytest.mark.slow)])
def test_concurrent_appends_are_all_there_once(tmp_path, item):
    # Given processes of which two append the same generations at a time
    store = Store.open(f"file://{tmp_path}/staging")
    store.root_id()
    starts = (0, 0, item, item)
    writers = [appending(store.uri, start, start + item) for start in starts]
    assert [writer.wait(300) for writer in writers] == [0] * len(starts)

    # Then each generation has one commit
    archive = archive_folder(store, "p")
    expected = [f"{number:032x}" for number in range(2 * item)]
    assert generations_in(archive) == expected
    assert look(archive).messages == len(expected)


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_appends_are_repeated_once(tmp_path, kills):
    # Given appends that are killed by SIGKILL, at any moment, and repeated
    store = Store.open(f"file://{tmp_path}/staging")
    store.root_id()
    for number in range(kills):
        writer = appending(store.uri, 0, 100_000, "--announce")
        signs = Path(tmp_path, "staging", "began")
        while not signs.exists():
            assert writer.poll() is None
            time.sleep(0.01)
        time.sleep(0.05 + number % 10 * 0.013)
        writer.send_signal(signal.SIGKILL)
        writer.wait(60)
        signs.unlink()
    archive = archive_folder(store, "p")
    last = max(int(name, 16) for name in generations_in(archive))
    assert appending(store.uri, 0, last + 2).wait(300) == 0

    # Then each is there once, and the table is whole
    assert generations_in(archive) == [f"{number:032x}" for number in range(last + 2)]
    assert look(archive).lost == ()


def test_archive_forgets_generations_older_than_ninety_days(tmp_path, monkeypatch):
    store, day = Store.open(f"file://{tmp_path}"), 86_400
    for age in (91, 89):
        with monkeypatch.context() as patched:
            clock = SimpleNamespace(time=lambda age=age: time.time() - age * day, sleep=time.sleep)
            patched.setattr(table, "time", clock)
            append_message(store, age)
    newest = table.open_table(archive_folder(store, "p"))
    assert [table.has_appended(newest, f"{age:032x}") for age in (91, 89)] == [False, True]


def test_late_settlement_appends_nothing_twice(world, monkeypatch):
    # Given a settlement that is paused right before its commit, while another one settles
    world.minutes(1, 2)
    run = world.run("paused")
    run.process()
    monkeypatch.setattr(RunWatcher, "settle_unwatched", lambda self: None)
    run.batch()
    real: Any = DeltaTable.create_write_transaction
    paused: list[bool] = []

    def pause(self: Any, *arguments: Any, **options: Any) -> None:
        if not paused:
            paused.append(True)
            run.ack()
        real(self, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", pause)
    run.ack()

    # Then Delta Lake refuses its commit, and the messages are there once
    assert paused
    assert look(world.archive).messages == 2


def test_late_settlement_loses_nothing_to_a_run_that_removes_unused_files(world, monkeypatch):
    # Given a settlement 8 days after its messages were received, and a vacuum before its commit
    world.live(1)
    world.minutes(2)
    run = world.run("late")
    run.process()
    for file in Path(world.store.root).rglob("archive/*.parquet"):
        os.utime(file, (0.0, time.time() - 8 * 86_400))

    def append_late(archive: Folder, *arguments: Any) -> bool:
        DeltaTable(folder_of(world)).vacuum(
            table._UNUSED_HOURS, dry_run=False, enforce_retention_duration=False, full=True
        )
        return table.append(archive, *arguments)

    monkeypatch.setattr("airflow_broadway.staging.archive.publication.append", append_late)
    run.batch()
    run.ack()

    found = look(world.archive)
    assert (found.messages, found.lost) == (2, ())


# -- buckets ---------------------------------------------------------------------------------------


@contextmanager
def s3_process() -> Iterator[dict[str, Any]]:
    """Options of a client; its server is a process, since calls of delta-rs may hold the GIL."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not is_listening(port):
            assert server.poll() is None
            time.sleep(0.1)
        endpoint = {"endpoint_url": f"http://127.0.0.1:{port}"}
        yield {"key": "test", "secret": "test", "client_kwargs": endpoint}
    finally:
        server.terminate()
        server.wait(60)


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_archive_in_a_bucket_is_read_and_purged():
    with s3_process() as options:
        store = Store.open("s3://bucket/staging", **options)
        store.fs.mkdir("bucket")
        for number in (0, 1, 2, 3, 2):
            append_message(store, number)
        archive = archive_folder(store, "p")
        interval = Interval(NOW, NOW + timedelta(hours=1))

        contents = look(archive, interval)
        parts = tables(archive, contents, interval)
        payloads = [payload for part in parts for payload in part["payload"].to_pylist()]
        assert payloads == [b"0", b"1", b"2", b"3"]

        maintain(archive, 1.0, NOW + timedelta(days=3))
        assert look(archive).messages == 0
