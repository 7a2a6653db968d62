"""A day of real flights, kept by its scheduled hour and run again over what live runs wrote.

The month goes through a real scheduler: ``tests/integration/test_flights_backfill.py``.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Interval, RunSource
from airflow_broadway.cli.app import main
from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.load_flights import flights, load
from tests.integration.backfills.import_flights import import_flights
from tests.integration.backfills.kept_flights import KeptFlights
from tests.integration.backfills.truth import rows_of, written
from tests.unit.runs.archive_steps import World
from tests.unit.runs.steps import balanced

DAY = datetime(2013, 1, 1, tzinfo=UTC)


def world_of(folder: Path) -> World:
    producer = {"conn_id": None, "path": str(folder / "queue.db")}
    context = {"output": str(folder / "rows")}
    return World(folder, KeptFlights, producer=producer, context=context)


def backfill(world: World, run_id: str, start: datetime, hours: int = 24) -> dict[str, Any]:
    interval = Interval(start, start + timedelta(hours=hours))
    return world.run(run_id, RunSource(kind="archive", interval=interval)).all()


def test_each_flight_is_written_once_by_live_runs_and_backfills(tmp_path):
    # Given a day and some of the next, in an order that no clock knows
    sent = list(islice(flights(), 1_100))
    random.Random(7).shuffle(sent)
    world = world_of(tmp_path)
    with SqliteQueue(tmp_path / "queue.db", "flights") as queue:
        for number, part in enumerate((sent[:500], sent[500:])):
            load(queue, part)
            world.run(f"live{number}").all()
    truth = rows_of(sent)
    assert written(tmp_path / "rows") == truth
    before = {path.parent.name for path in (tmp_path / "rows").rglob("*.jsonl")}

    # When the day is run again, twice
    for run_id in ("once", "twice"):
        report = backfill(world, run_id, DAY)
        assert balanced(report)["acked"] == len(truth["2013-01-01"])
        # Then its rows are those of the source file, once, and the next day's stay
        assert written(tmp_path / "rows") == truth

    batches = {path.parent.name for path in (tmp_path / "rows").rglob("*.jsonl")}
    assert batches != before
    backfill(world, "thrice", DAY)
    assert {path.parent.name for path in (tmp_path / "rows").rglob("*.jsonl")} == batches


GUIDE = Path(__file__).parents[3] / "docs" / "backfills.md"


def test_guide_quotes_the_tested_pipeline_and_dag():
    folder = Path(__file__).parents[2] / "integration" / "backfills"
    names = ("import_flights.py", "kept_flights.py", "dags/kept_flights_dag.py")
    package = "tests.integration.backfills."  # a reader's module is next to the DAG file
    sources = [(folder / name).read_text().replace(package, "") for name in names]

    quotes = re.findall(r"^```py\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)

    assert len(quotes) == 4
    del quotes[1]  # a variant of the last one
    for quote, source in zip(quotes, sources, strict=True):
        assert quote in source


def test_commands_of_the_guide_work(tmp_path, monkeypatch, capsys):
    world = world_of(tmp_path)
    world.store.root_id()
    put_flights(tmp_path, world, 50)
    commands = re.findall(r"^airflow-broadway (archive .*)$", GUIDE.read_text(), re.MULTILINE)

    for command in commands:
        words = shlex.split(command)
        assert main([*words[:2], "--staging", world.store.uri, *words[2:]]) == 0, command

    assert "Removed 50 messages of" in capsys.readouterr().out


def put_flights(folder: Path, world: World, count: int) -> list[dict[str, Any]]:
    """Imports the first flights as the guide does."""
    sent = list(islice(flights(), count))
    path = folder / "flights.jsonl"
    path.write_text("".join(json.dumps(flight) + "\n" for flight in sent))
    import_flights(path, f"{world.store.root}/{world.archive.path}")
    return sent


@pytest.mark.parametrize("before", [False, True])
def test_imported_messages_are_processed_like_received_ones(tmp_path, before):
    # Given messages that are imported before or after the archive of live runs begins
    world = world_of(tmp_path)
    with SqliteQueue(tmp_path / "queue.db", "flights") as queue:
        load(queue, list(islice(flights(), 900, 1_100)))
    if not before:
        world.run("live").all()
    sent = put_flights(tmp_path, world, 900)
    if before:
        world.run("live").all()
    shutil.rmtree(tmp_path / "rows")

    backfill(world, "again", DAY, hours=72)

    assert written(tmp_path / "rows") == rows_of([*sent, *islice(flights(), 900, 1_100)])
