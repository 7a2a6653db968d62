"""A dry run counts the messages of its sources, and receives none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RUN, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.runs.sources.dry_run import DryRun
from tests.unit.runs.archive_steps import Run, World, of_minutes
from tests.unit.runs.steps import balanced


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def dry(run: Run, *, index: int | None = 0, report: bool = False, **budget: Any) -> dict[str, Any]:
    """The process task of a dry run; returns its reference."""
    dry_run = DryRun(
        run.staged,
        run.pipeline,
        run.task("process", 0),
        run.ports,
        index=index,
        budget=Budget(**budget),
        source=run.source,
    )
    return dry_run.run(report=report)


def state(world: World) -> tuple[QueueDepth, set[Path]]:
    """The queue, but for the age of its messages, and all that lies in staging."""
    with world.queue() as queue:
        depth = queue.depth()
    files = {path for path in (world.folder / "staging").rglob("*") if path.is_file()}
    return depth._replace(oldest_age=None), files


def failed(world: World, *minutes: int) -> None:
    """Let messages become dead letters."""
    world.send(*({"minute": minute, "fails": "process"} for minute in minutes))
    for number in (1, 2):
        world.run(f"dead{number}").all()


def test_queue_source_reports_depth_and_budget(world):
    world.minutes(*range(5))
    before = state(world)

    run = world.run("dry")
    reference = dry(run, max_messages=3, max_seconds=300.0)

    assert (reference["received"], reference["batchers"]) == (0, {})
    assert reference["look"]["messages"] == 5
    # And only its result is kept
    depth, files = state(world)
    assert depth == before[0]
    assert {path.name for path in files - before[1]} == {"look.json", ".broadway-root.json"}
    assert run.batch() is None
    report = run.ack()
    assert lines_of(report)[-1] == (
        "A run now would take 3 messages at most (max_messages=3, max_seconds=300.0)."
    )
    assert "The queue: 5 ready, 0 wait for a retry, 0 held by runs" in lines_of(report)[-2]
    assert balanced(report)["received"] == 0


def test_dry_run_keeps_only_its_report(world):
    world.minutes(1)
    run = world.run("dry")
    dry(run)

    first, again = run.ack(), run.ack()

    assert first["look"] == again["look"]
    assert first["look"]["messages"] == 1
    assert run.staged.files.list("") == ["report.json", "report.md"]


def test_cleared_dry_run_counts_again(world):
    world.minutes(1)
    run = world.run("dry")
    dry(run)
    assert run.ack()["look"]["messages"] == 1

    world.minutes(2)
    dry(run)

    assert run.ack()["look"]["messages"] == 2


def test_first_of_several_producers_counts_for_all(tmp_path):
    producer = {"path": str(tmp_path / "queue.db"), "concurrency": 2}
    world = World(tmp_path, producer=producer)
    world.minutes(*range(5))
    run = world.run("dry")

    assert "look" not in dry(run, index=1, max_messages=2)
    look = dry(run, index=0, max_messages=2)["look"]

    assert look["producers"] == 2
    [last] = lines_of({"look": look})[-1:]
    assert last.startswith("A run now would take 4 messages at most (max_messages=2, of each of 2")


def test_leases_of_a_dead_run_stay(world):
    # Given a run that died with its messages
    world.minutes(1, 2)
    world.run("died").process()
    world.over.add("died")

    look = dry(world.run("dry"))["look"]

    # Then they are counted, and none is settled
    assert (look["depth"]["leased"], look["messages"]) == (2, 0)
    assert state(world)[0].leased == 2


def test_dead_letters_are_counted_and_stay(world):
    failed(world, 1, 2)
    world.minutes(3)
    before = state(world)[0]
    assert before.dead == 2

    run = world.run("dry", RunSource(kind=DEAD_LETTERS))
    look = dry(run)["look"]

    assert (look["dead_letters"], look["messages"]) == (2, 3)
    assert state(world)[0] == before
    assert "A run would send 2 dead letters back first, and drain the queue behind that." in (
        lines_of(run.ack())
    )


@pytest.mark.parametrize(
    ("action", "waiting", "sentence"),
    [
        ("requeue", 2, "A run would send 1 dead letter back first, and drain the queue behind"),
        ("delete", 0, "A run would delete 1 dead letter, and receive nothing."),
    ],
)
def test_chosen_dead_letters_are_counted(world, action, waiting, sentence):
    failed(world, 1, 2)
    world.minutes(3)
    with world.queue() as queue:
        first = next(iter(queue.dead_letters(limit=None)))
    before = state(world)[0]

    run = world.run(
        "dry", RunSource(kind=DEAD_LETTERS, only={"action": action, "ids": [first.message_id]})
    )
    look = dry(run)["look"]

    assert (look["dead_letters"], look["messages"]) == (1, waiting)
    assert state(world)[0] == before
    assert any(line.startswith(sentence) for line in lines_of(run.ack()))


def test_archive_interval_is_counted_by_its_index(world):
    world.live(1, 2, 59)
    before = state(world)

    look = dry(world.run("dry", of_minutes(0, 60)))["look"]

    assert (look["messages"], look["at_most"]) == (3, True)
    assert look["source"]["interval"] == ["2013-01-01T09:00:00+00:00", "2013-01-01T10:00:00+00:00"]
    assert state(world)[0] == before[0]
    assert "A run would take all messages of the interval: 3 at most." in lines_of({"look": look})


def test_missing_part_of_interval_is_reported(world):
    look = dry(world.run("dry", of_minutes(0, 60)))["look"]

    assert look["messages"] == 0
    assert any("nothing was archived yet" in line for line in lines_of({"look": look}))


def test_batches_of_a_past_run_are_counted(world):
    world.live(*range(6), run_id="past")

    look = dry(world.run("dry", RunSource(kind=RUN, run_id="past")))["look"]

    assert (look["messages"], look["batches"]) == (6, 2)
    assert "6 messages in 2 batches of the past run would be handled again." in (
        lines_of({"look": look})
    )


def test_invalid_source_is_refused_as_in_a_run(world):
    with pytest.raises(RequestRefused, match="there is no staged run 'gone'"):
        dry(world.run("dry", RunSource(kind=RUN, run_id="gone")))


def test_unknown_depth_is_not_zero(world, monkeypatch):
    monkeypatch.setattr(SqliteProducer, "depth", lambda *_: None)

    look = dry(world.run("dry"))["look"]

    assert look["messages"] is None
    assert lines_of({"look": look})[-1] == (
        "The number of messages is unknown: it could not be counted, and is not zero."
    )


def test_dry_run_without_sensor_keeps_its_report(world):
    world.minutes(1)
    run = world.run("dry")

    dry(run, index=None, report=True)

    assert run.staged.files.list("") == ["report.json", "report.md"]
