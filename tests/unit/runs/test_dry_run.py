"""A dry run: what it counts at each source, and that it takes nothing."""

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


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def dry(run: Run, *, index: int | None = 0, report: bool = False, **budget: Any) -> dict[str, Any]:
    """The process task of a dry run; returns its reference."""
    made = DryRun(
        run.staged,
        run.pipeline,
        run.task("process", 0),
        run.ports,
        index=index,
        budget=Budget(**budget),
        source=run.source,
    )
    return made.run(report=report)


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


def test_of_the_queue_it_tells_what_waits_and_what_a_run_would_take(world: World) -> None:
    world.minutes(*range(5))
    before = state(world)

    run = world.run("dry")
    reference = dry(run, max_messages=3, max_seconds=300.0)

    assert (reference["received"], reference["batchers"]) == (0, {})
    assert reference["look"]["messages"] == 5
    # And of it all only what it found is kept
    depth, files = state(world)
    assert depth == before[0]
    assert {path.name for path in files - before[1]} == {"look.json", ".broadway-root.json"}
    assert run.batch() is None
    report = run.ack()
    assert lines_of(report)[-1] == (
        "A run now would take 3 messages at most (max_messages=3, max_seconds=300.0)."
    )
    assert "The queue: 5 ready, 0 wait for a retry, 0 held by runs" in lines_of(report)[-2]
    assert report["balanced"]
    assert report["totals"]["received"] == 0


def test_its_account_has_what_it_found_and_leaves_no_file_but_its_report(world: World) -> None:
    world.minutes(1)
    run = world.run("dry")
    dry(run)

    first, again = run.ack(), run.ack()

    assert first["look"] == again["look"]
    assert first["look"]["messages"] == 1
    assert run.staged.files.list("") == ["report.json", "report.md"]


def test_cleared_it_looks_again(world: World) -> None:
    world.minutes(1)
    run = world.run("dry")
    dry(run)
    assert run.ack()["look"]["messages"] == 1

    world.minutes(2)
    dry(run)

    assert run.ack()["look"]["messages"] == 2


def test_of_several_producers_the_first_looks_for_all(tmp_path: Path) -> None:
    producer = {"path": str(tmp_path / "queue.db"), "concurrency": 2}
    world = World(tmp_path, producer=producer)
    world.minutes(*range(5))
    run = world.run("dry")

    assert "look" not in dry(run, index=1, max_messages=2)
    look = dry(run, index=0, max_messages=2)["look"]

    assert look["producers"] == 2
    [last] = lines_of({"look": look})[-1:]
    assert last.startswith("A run now would take 4 messages at most (max_messages=2, of each of 2")


def test_what_a_dead_run_holds_stays_with_it(world: World) -> None:
    # Given a run that died with its messages
    world.minutes(1, 2)
    world.run("died").process()
    world.over.add("died")

    look = dry(world.run("dry"))["look"]

    # Then they are counted where they are, and settled by nobody
    assert (look["depth"]["leased"], look["messages"]) == (2, 0)
    assert state(world)[0].leased == 2


def test_dead_letters_are_counted_and_stay(world: World) -> None:
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
def test_of_dead_letters_those_that_a_run_would_move_are_counted(
    world: World, action: str, waiting: int, sentence: str
) -> None:
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


def test_an_interval_of_the_archive_is_counted_by_its_index(world: World) -> None:
    world.minutes(1, 2, 59)
    world.run("live").all()
    before = state(world)

    look = dry(world.run("dry", of_minutes(0, 60)))["look"]

    assert (look["messages"], look["at_most"]) == (3, True)
    assert look["source"]["interval"] == [
        "2013-01-01T09:00:00+00:00",
        "2013-01-01T10:00:00+00:00",
    ]
    assert state(world)[0] == before[0]
    assert "A run would take all messages of the interval: 3 at most." in lines_of({"look": look})


def test_what_is_missing_of_an_interval_is_told(world: World) -> None:
    look = dry(world.run("dry", of_minutes(0, 60)))["look"]

    assert look["messages"] == 0
    assert any("nothing was archived yet" in line for line in lines_of({"look": look}))


def test_the_batches_of_a_past_run_are_counted(world: World) -> None:
    world.minutes(*range(6))
    world.run("past").all()

    look = dry(world.run("dry", RunSource(kind=RUN, run_id="past")))["look"]

    assert (look["messages"], look["batches"]) == (6, 2)
    assert "6 messages in 2 batches of the past run would be handled again." in (
        lines_of({"look": look})
    )


def test_what_a_run_would_be_refused_for_its_dry_run_is(world: World) -> None:
    with pytest.raises(RequestRefused, match="there is no staged run 'gone'"):
        dry(world.run("dry", RunSource(kind=RUN, run_id="gone")))


def test_what_no_broker_tells_is_unknown_and_not_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteProducer, "depth", lambda *_: None)

    look = dry(world.run("dry"))["look"]

    assert look["messages"] is None
    assert lines_of({"look": look})[-1] == (
        "The number of messages is unknown: it could not be counted, and is not zero."
    )


def test_without_a_sensor_it_keeps_the_report_itself(world: World) -> None:
    world.minutes(1)
    run = world.run("dry")

    dry(run, index=None, report=True)

    assert run.staged.files.list("") == ["report.json", "report.md"]
