"""Sinks with a time column: a backfill replaces the rows of its interval."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from airflow_broadway import Batcher, BatchInfo, Interval
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, PipelineError, RequestRefused
from airflow_broadway.core.formats import commits
from airflow_broadway.core.model.run_source import LOG, RUN, RunSource
from airflow_broadway.core.model.sink import CommitInDoubt, CommitRefused, SinkEnv, SinkError
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.sinks import time_sinks
from airflow_broadway.runs.sources.choice import SourceRequest, choose_source
from airflow_broadway.runs.tasks import UnstagedTask
from airflow_broadway.sinks import DeltaTable
from airflow_broadway.sinks.delta import _Client
from airflow_broadway.staging.run_folder import StagedRun
from tests.unit.runs.archive_steps import NINE, Minutes, Run, World, of_minutes
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


def test_backfill_of_an_interval_that_is_not_whole_in_the_archive_is_refused(
    world: World, table: Path
) -> None:
    # Given rows of an interval before the archive was begun
    stray = {"at": [NINE.replace(year=2012)], "minute": [180], "run": ["by hand"]}
    deltalake.write_deltalake(table, pa.table(stray, schema=SCHEMA), mode="append")
    kept = rows(table)

    source = of_minutes(0, 60)
    assert source.interval is not None
    earlier = Interval(*(time.replace(year=2012) for time in source.interval))
    with pytest.raises(RequestRefused, match=r"not whole in the archive.*time_column"):
        world.run("again", replace(source, interval=earlier)).process()

    assert rows(table) == kept


def test_backfill_during_an_unsettled_live_run_is_refused(world: World, table: Path) -> None:
    world.minutes(8)
    world.run("live2").process()
    kept = rows(table)

    with pytest.raises(RequestRefused, match=r"not whole in the archive.*time_column"):
        world.run("again", of_minutes(0, 60)).process()

    assert rows(table) == kept


def test_log_of_the_broker_is_refused(world: World) -> None:
    request = SourceRequest("manual", kind=LOG, start=NINE, end=NINE + timedelta(hours=1))
    pipeline = world.pipeline("manual")
    object.__setattr__(pipeline.producer, "backfills", True)
    with pytest.raises(RequestRefused, match="a sink has a time_column"):
        choose_source(pipeline, request)


def test_run_in_one_task_is_refused(world: World) -> None:
    run = world.run("again", of_minutes(0, 60))
    task = UnstagedTask(
        run.staged, run.pipeline, run.task("run"), run.ports, budget=Budget(), source=run.source
    )
    with pytest.raises(RequestRefused, match="use a task group"):
        task.run()


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
            world.run("dead", of_minutes(0, 60)).all()

    precede(monkeypatch, meanwhile, _Client, "delete", once=True)

    # When it goes on after another execution, or another run, has replaced the rows
    with pytest.raises(BroadwayError, match=r"was ruled out|abandoned|settled"):
        world.run("dead", of_minutes(0, 60)).process()

    name = "again" if swept else "dead"
    assert rows(table) == [(3, name), (7, name), (65, "live")]


def test_wrong_time_column_is_one_clear_error(tmp_path: Path, table: Path) -> None:
    sink = {"sink": {"path": str(table), "time_column": "when"}}
    world = World(tmp_path, Timed, batchers={"default": sink})
    world.forks = False

    world.minutes(3)
    run = world.run("live")
    run.process()
    run.batch()

    assert "the time_column 'when'" in run.ack()["reasons"][0]["reason"]
    assert rows(table) == []


def test_past_run_is_run_again_into_a_sink_that_was_changed_since(
    tmp_path: Path, world: World, table: Path
) -> None:
    # Given a settled run, and a sink that is another since
    deltalake.DeltaTable.create(tmp_path / "new", schema=SCHEMA)
    world.ref["options"]["batchers"] = {"default": {"sink": {"path": str(tmp_path / "new")}}}

    report = world.run("again", RunSource(kind=RUN, run_id="live")).all()

    assert rows(tmp_path / "new") == [(3, "again"), (7, "again"), (65, "again")]
    assert report["totals"]["released"] == 0


# -- two at one time ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [(0, 60), (5, 8), (6, 90)])
def test_second_backfill_of_an_interval_waits_until_the_first_is_settled(
    world: World, table: Path, overlap: tuple[int, int]
) -> None:
    first = world.run("first", of_minutes(0, 60))
    first.process()

    with pytest.raises(SinkError, match=r"run 'first' of the Dag 'd' .* is not settled yet"):
        world.run("second", of_minutes(*overlap)).process()
    first.batch()
    first.ack()
    assert rows(table) == [(3, "first"), (7, "first"), (65, "live")]

    world.backfill("second", *overlap)
    assert [minute for minute, _ in rows(table)] == [3, 7, 65]
    assert (7, "second") in rows(table)


def test_second_backfill_of_another_dag_is_refused_as_well(world: World, table: Path) -> None:
    world.run("first", of_minutes(0, 60)).process()
    other = world.run("second", of_minutes(0, 60))
    other.in_dag("e")

    with pytest.raises(SinkError, match="of the Dag 'd'"):
        other.process()


def test_backfills_of_other_intervals_and_producers_of_one_run_go_on_together(
    world: World, table: Path
) -> None:
    first, second = world.run("first", of_minutes(0, 60)), world.run("second", of_minutes(60, 120))
    first.process()
    first.process(1)
    second.process()
    for run in (first, second):
        run.batch()
        run.ack()

    assert rows(table) == [(3, "first"), (7, "first"), (65, "second")]


@pytest.mark.parametrize("backfill_first", [True, False])
def test_backfill_and_past_run_exclude_each_other(
    world: World, table: Path, backfill_first: bool
) -> None:
    sources = [of_minutes(0, 60), RunSource(kind=RUN, run_id="live")]
    first, second = sources if backfill_first else reversed(sources)
    world.run("first", first).process()

    with pytest.raises(SinkError, match="run 'first'"):
        world.run("second", second).process()


def test_interval_of_a_dead_run_is_taken_over_after_its_settlement(
    world: World, table: Path
) -> None:
    dead = world.run("dead", of_minutes(0, 60))
    dead.process()
    world.over.add("dead")

    world.backfill("again")

    dead.batch()
    assert rows(table) == AFTERWARDS


def test_of_two_that_begin_together_only_one_handles_the_interval(
    world: World, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that is paused before it records its generation, until another has prepared
    second = world.run("second", of_minutes(0, 60))
    precede(monkeypatch, lambda *_, **__: second.process(), StagedRun, "open_generation", once=True)

    with pytest.raises(SinkError, match="run 'second'"):
        world.run("first", of_minutes(0, 60)).process()

    second.batch()
    second.ack()
    assert rows(table) == [(3, "second"), (7, "second"), (65, "live")]


@pytest.mark.parametrize("died", ["try", "run"])
def test_process_that_wakes_after_its_try_or_run_is_over_deletes_nothing(
    world: World, table: Path, monkeypatch: pytest.MonkeyPatch, died: str
) -> None:
    # Given a process that is paused before it records its generation, and that nobody waits for
    def meanwhile(*_: Any, **__: Any) -> None:
        if died == "run":
            world.over.add("dead")
            world.backfill("again")
        else:
            second = world.run("dead", of_minutes(0, 60))
            monkeypatch.setattr(
                second, "task", lambda *a: replace(Run.task(second, *a), try_number=2)
            )
            second.all()
            world.over.clear()

    precede(monkeypatch, meanwhile, StagedRun, "open_generation", once=True)
    with pytest.raises(LeaseLapsed, match="nothing writes again"):
        world.run("dead", of_minutes(0, 60)).process()

    name = "again" if died == "run" else "dead"
    assert rows(table) == [(3, name), (7, name), (65, "live")]


def test_deletion_in_doubt_is_ruled_out_before_its_run_counts_as_settled(
    world: World, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a deletion that is still on its way when the table cannot be reached any more
    late: list[Any] = []

    def lost(client: _Client, interval: Interval, commit: Any) -> None:
        late.extend([interval, commit])
        raise ConnectionError("reset")

    def unreachable(*_: Any) -> Any:
        raise SinkError("unreachable")

    monkeypatch.setattr(commits, "_PAUSES", (0.0,))
    with monkeypatch.context() as patched:
        patched.setattr(_Client, "delete", lost)
        patched.setattr(_Client, "rule_out", unreachable)
        with pytest.raises(CommitInDoubt):
            world.run("dead", of_minutes(0, 60)).process()

    # When another run has replaced the rows, and the deletion arrives
    world.over.add("dead")
    world.backfill("again")
    [sink] = time_sinks(world.pipeline("dead"))
    with pytest.raises(CommitRefused):
        sink.open(SinkEnv()).delete(*late)

    assert rows(table) == AFTERWARDS


class TwoColumns(Timed):
    batchers = {
        "default": Timed.batchers["default"],
        "other": Batcher(engine="python", sink=DeltaTable(path="/replaced", time_column="run")),
    }


def test_one_table_has_one_time_column(tmp_path: Path, table: Path) -> None:
    world = World(tmp_path, TwoColumns)
    with pytest.raises(PipelineError, match=r"different time_columns, 'at' and 'run'"):
        world.run("again", of_minutes(0, 60)).process()
