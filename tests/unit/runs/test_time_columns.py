"""Sinks with a time column: a backfill replaces the rows of its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from airflow_broadway import Batcher, BatchInfo
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.model.sink import SinkError
from airflow_broadway.sinks import DeltaTable
from airflow_broadway.sinks.delta import _Client
from tests.unit.runs.archive_steps import NINE, Minutes, World, of_minutes
from tests.unit.runs.steps import precede

_FIELDS: list[Any] = [
    pa.field("at", pa.timestamp("us", tz="UTC")),
    pa.field("minute", pa.int64()),
    pa.field("run", pa.string()),
]
SCHEMA = pa.schema(_FIELDS)


class Timed(Minutes):
    """Commits each minute with its time and the run that handled it."""

    batchers = {
        "default": Batcher(
            engine="python",
            batch_size=4,
            batch_timeout=None,
            sink=DeltaTable(path="/replaced", time_column="at"),
        )
    }

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        minutes = [message.data["minute"] for message in messages]
        times = [NINE.replace(minute=minute % 60, hour=9 + minute // 60) for minute in minutes]
        return [
            {"at": at, "minute": minute, "run": self.run.run_id}
            for at, minute in zip(times, minutes, strict=True)
        ]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table"
    deltalake.DeltaTable.create(path, schema=SCHEMA)
    return path


@pytest.fixture
def world(tmp_path: Path, table: Path) -> World:
    world = World(tmp_path, Timed, batchers={"default": {"sink": {"path": str(table)}}})
    world.forks = False  # deltalake, which has been used here, survives no fork
    world.live(3, 7, 65)
    return world


def rows(table: Path) -> list[tuple[int, str]]:
    found = deltalake.DeltaTable(table).to_pyarrow_table().to_pylist()
    return sorted((row["minute"], row["run"]) for row in found)


AFTERWARDS = [(3, "again"), (7, "again"), (65, "live")]


def test_backfill_replaces_the_rows_of_its_interval(world: World, table: Path) -> None:
    assert rows(table) == [(3, "live"), (7, "live"), (65, "live")]

    world.backfill("again")

    assert rows(table) == AFTERWARDS


def test_backfill_of_an_interval_without_messages_removes_its_rows(
    world: World, table: Path
) -> None:
    stray = {"at": [NINE.replace(hour=12)], "minute": [180], "run": ["by hand"]}
    deltalake.write_deltalake(table, pa.table(stray, schema=SCHEMA), mode="append")

    world.backfill("again", 120, 240)

    assert rows(table) == [(3, "live"), (7, "live"), (65, "live")]


def test_cleared_backfill_replaces_its_own_rows(world: World, table: Path) -> None:
    run = world.run("again", of_minutes(0, 60))
    run.process()
    run.batch()
    run.references.clear()

    run.all()

    assert rows(table) == AFTERWARDS


@pytest.mark.parametrize("swept", [False, True], ids=["retried", "settled by another run"])
def test_paused_backfill_deletes_nothing_that_was_committed_since(
    world: World, table: Path, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    # Given a process task that is paused immediately before it deletes
    def meanwhile(*_: Any) -> None:
        if swept:
            world.over.add("dead")
            world.backfill("again")
        else:
            run = world.run("dead", of_minutes(0, 60))
            run.all()

    precede(monkeypatch, meanwhile, _Client, "delete", once=True)

    # When it goes on after another execution, or another run, has replaced the rows
    with pytest.raises(BroadwayError, match=r"was ruled out|abandoned|settled"):
        world.run("dead", of_minutes(0, 60)).process()

    name = "again" if swept else "dead"
    assert rows(table) == [(3, name), (7, name), (65, "live")]


def test_wrong_time_column_is_one_clear_error(tmp_path: Path, table: Path) -> None:
    sink = {"sink": {"path": str(table), "time_column": "when"}}
    world = World(tmp_path, Timed, batchers={"default": sink})
    world.live(3)

    with pytest.raises(SinkError, match=r"when.*nothing was written"):
        world.run("again", of_minutes(0, 60)).process()

    assert rows(table) == [(3, "live")]
