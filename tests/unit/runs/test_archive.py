"""The archive: what a run received is kept once it is settled, and an interval is run again."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_broadway import Archive, Batcher, Interval, Message, RunSource, ack_immediately
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import (
    LeaseLapsed,
    PipelineError,
    RequestRefused,
    StagingError,
)
from airflow_broadway.core.model.run_source import LOG
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.sources.archived import PastProducer
from airflow_broadway.runs.sources.pipelines import prepare_sink, with_source
from airflow_broadway.runs.tasks import BatchTask, ProcessTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.archive.failed import failures
from airflow_broadway.staging.archive.layout import hour_of
from airflow_broadway.staging.archive.reader import hours_of, look, tables
from airflow_broadway.staging.archive.removal import purge
from airflow_broadway.staging.disk import Disk
from airflow_broadway.staging.isolation import split
from airflow_broadway.staging.store import Folder
from tests.unit.runs.archive_steps import NINE, Minutes, World, of_minutes, upper

NINE_TO_ELEVEN = Interval(NINE, NINE + timedelta(hours=2))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_backfill_gets_what_was_received_before_any_code_of_the_users(world: World) -> None:
    # Given messages that live runs handled, out of order
    world.minutes(7, 3, 65, 5)
    world.run("live").all()

    # When an hour of them is run again
    report = world.backfill("again")

    # Then callbacks get the same, and know what it is
    assert report["totals"]["received"] == report["totals"]["acked"] == 3
    assert report["balanced"]
    [batch] = world.sink("again")
    assert [minute for _, minute in batch["rows"]] == [3, 5, 7]
    assert batch["source"] == "archive"
    assert batch["interval"] == str(of_minutes(0, 60).interval)
    assert batch["redelivered"] == 3
    live = {row[1]: row[0] for each in world.sink("live") for row in each["rows"]}
    assert {minute: key for key, minute in batch["rows"]} == {
        minute: live[minute] for minute in (3, 5, 7)
    }
    # And of a part of the hour those from its start to before its end
    world.backfill("part", 3, 5)
    assert world.rows("part") == [3]
    # And the queue was not asked for anything
    with world.queue() as queue:
        assert queue.depth() == (0, 0, 0, 0, None)


def test_two_backfills_make_the_same_batches_whatever_was_delivered_how(world: World) -> None:
    for minutes in ((9, 1, 8), (2, 7), (3, 6, 4, 5)):
        world.minutes(*minutes)
        world.run(f"live{minutes[0]}").all()

    world.backfill("first")
    world.ref["options"]["processors"] = {"concurrency": 3, "max_demand": 2}
    world.backfill("second")

    first, second = world.sink("first"), world.sink("second")
    assert world.rows("first") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [(each["batch_id"], each["rows"]) for each in first] == [
        (each["batch_id"], each["rows"]) for each in second
    ]
    assert len(first) == 3


def test_order_is_that_of_the_archive_though_processors_part_the_messages(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Parted)
    world.minutes(*range(20))
    world.run("live").all()

    world.backfill("again")

    assert world.rows("again") == list(range(20))


class Parted(Minutes):
    @staticmethod
    def partition_by(message: Message) -> int:
        return len(message.message_id) + int(message.message_id[-1], 36)


def test_nothing_is_seen_before_it_is_settled_and_then_all_at_once(world: World) -> None:
    world.minutes(1, 61, 2)
    run = world.run("live")
    run.process()
    assert look(world.archive).messages == 0

    run.batch()
    run.ack()

    found = look(world.archive)
    assert found.messages == 3
    assert [sum(files.values()) for files in found.hours.values()] == [2, 1]


def test_what_the_queue_delivers_again_is_archived_by_the_run_that_settles_it(
    world: World,
) -> None:
    # Given a message that fails, and is tried again, and one that is given back
    world.send({"minute": 1, "fails": "batch"}, {"minute": 2})
    world.run("one").all()
    assert look(world.archive).messages == 1
    dead = world.run("two")
    dead.process()  # and no more: its message goes back
    world.over.add("two")

    # When later runs settle them for good
    world.run("three").all()
    world.run("four").all()

    # Then each is there once
    assert look(world.archive).messages == 2
    world.backfill("again")
    assert world.rows("again") == [1, 2]


@pytest.mark.parametrize("damaged", ["manifest.json", "failed-*.jsonl"])
def test_a_damaged_file_keeps_no_message_out_of_the_archive_and_no_run_unsettled(
    world: World, damaged: str
) -> None:
    # Given a run that is over, and of which nobody can say any more what it came to
    world.send({"minute": 1, "fails": "process"}, {"minute": 2})
    dead = world.run("dead")
    dead.process()
    world.over.add("dead")
    [path] = (world.folder / "staging").rglob(damaged)
    path.write_text(path.read_text().replace('"received": 2', '"received": 1').replace("sour", ""))

    # When the next run sweeps
    world.run("next").all()
    world.run("last").all()

    # Then all of it went back, and was handled and archived once
    assert [each.state for each in dead.staged.generations()] == ["settled"]
    assert look(world.archive).messages == 2
    # And nobody died of a message
    assert not list((world.folder / "staging").rglob("deaths/*"))


def test_a_run_that_died_before_its_manifest_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.minutes(1, 2)
    monkeypatch.setattr("airflow_broadway.runs.process.Process._publish", _dies)
    with pytest.raises(KeyboardInterrupt):
        world.run("dead").process()
    monkeypatch.undo()

    world.run("live").all()

    assert look(world.archive).messages == 2


def _dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_what_fails_in_a_backfill_is_kept_beside_the_archive(world: World) -> None:
    world.send({"minute": 1}, {"minute": 2, "fails": "process"}, {"minute": 3, "fails": "batch"})
    for run_id in ("one", "two"):
        world.run(run_id).all()

    report = world.backfill("again")

    assert report["totals"]["dead_lettered"] == 2
    assert report["totals"]["acked"] == 1
    assert report["balanced"]
    found = {each["reason"]: each for each in failures(world.archive)}
    assert {reason: each["stage"] for reason, each in found.items()} == {
        "sour": "process",
        "spilt": "batch",
    }
    assert {each["run_id"] for each in found.values()} == {"again"}
    assert found["sour"]["time"] == (NINE + timedelta(minutes=2)).isoformat()
    # Settling it once more writes the same.
    world.run("again", of_minutes(0, 60)).ack()
    assert len(list(failures(world.archive))) == 2


def test_a_backfill_that_is_cleared_reads_anew_and_makes_the_same(world: World) -> None:
    world.minutes(1, 2, 3)
    world.run("live").all()
    run = world.run("again", of_minutes(0, 60))
    run.process()
    run.references.clear()
    run.process()
    run.batch()
    report = run.ack()

    assert report["totals"]["released"] == 3
    assert report["totals"]["acked"] == 3
    assert world.rows("again") == [1, 2, 3]


def test_a_backfill_sweeps_no_live_run_and_a_live_run_sweeps_a_backfill(world: World) -> None:
    world.minutes(1)
    world.run("live").all()
    world.minutes(2)
    world.run("dead").process()
    world.run("past", of_minutes(0, 60)).process()
    world.over |= {"dead", "past"}

    world.backfill("again")
    with world.queue() as queue:
        assert queue.depth().leased == 1

    world.run("live2").all()
    with world.queue() as queue:
        assert queue.depth()[:3] == (0, 0, 0)
    dead = world.run("past").staged
    assert [each.state for each in dead.generations()] == ["settled"]


def test_an_interval_that_is_not_read_to_its_end_counts_for_nothing(world: World) -> None:
    world.minutes(1, 2, 3)
    world.run("live").all()
    run = world.run("again", of_minutes(0, 60))
    task = ProcessTask(
        run.staged,
        run.pipeline,
        run.task("process"),
        run.ports,
        budget=Budget(max_messages=2),
        source=run.source,
    )

    with pytest.raises(PipelineError, match=r"not read to its end.*'max_messages', after 2"):
        task.run()

    assert [each.state for each in run.staged.generations()] == ["settled"]


def test_messages_without_a_time_of_their_own_are_kept_and_told(world: World) -> None:
    world.send({"minute": 1}, {"minute": "soon"}, {"minute": "late"})
    world.run("live").all()

    found = look(world.archive)
    assert found.messages == 3
    [(why, count)] = found.untimed.items()
    assert count == 2
    assert why.startswith("TypeError")


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (NINE.replace(tzinfo=None), "ValueError: expected an aware datetime, got one without"),
        ("nine", "TypeError: expected an aware datetime, got: 'nine'"),
        (None, "TypeError: expected an aware datetime, got: None"),
    ],
)
def test_what_is_no_instant_is_no_time(tmp_path: Path, gives: Any, why: str) -> None:
    class Odd(Minutes):
        name = "Minutes"
        archive = Archive(time=lambda message: gives)

    world = World(tmp_path)
    run = world.run("live")
    run.pipeline.archive = Odd.archive
    world.minutes(1)
    run.all()

    [told] = look(world.archive).untimed
    assert told.startswith(why)


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (datetime(1, 1, 1, tzinfo=UTC), ""),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), ""),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5))), "OverflowError"),
        (datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5))), "OverflowError"),
    ],
)
def test_the_first_and_the_last_instant_are_kept_and_found(
    tmp_path: Path, gives: Any, why: str
) -> None:
    """Other systems write "unknown" and "never" so; a year has four digits all the same."""
    world = World(tmp_path)
    run = world.run("live")
    run.pipeline.archive = Archive(time=lambda message: gives)
    world.minutes(1)
    run.all()

    found = look(world.archive)
    assert found.messages == 1
    assert [each.partition(":")[0] for each in found.untimed] == ([why] if why else [])


def test_an_archive_by_the_brokers_time_has_it(tmp_path: Path) -> None:
    world = World(tmp_path, archive={"time": "enqueued_at"}, pipeline=Minutes)
    world.minutes(1)
    world.run("live").all()

    found = look(world.archive)
    assert found.messages == 1
    assert not found.untimed


# -- gaps ------------------------------------------------------------------------------------------


def notes(report: dict[str, Any]) -> str:
    return "; ".join(report["notes"])


def test_what_is_missing_of_an_interval_is_told_in_the_report(world: World) -> None:
    assert "nothing was archived yet" in notes(world.backfill("early"))
    world.minutes(1)
    world.run("live").all()

    assert notes(world.backfill("fine")) == ""
    assert "nothing is archived of it" in notes(world.backfill("none", 120, 180))
    [path] = look(world.archive).hours[hour_of(NINE)]
    other = Path(world.store.root) / world.archive.path / path
    other.with_name(other.name.replace("00000", "00001")).write_bytes(other.read_bytes())
    other.unlink()
    assert "1 file of it are gone" in notes(world.backfill("lost"))


@pytest.mark.parametrize("removed", ["hour", "day", "file"])
def test_what_somebody_removed_by_hand_is_a_gap_until_it_is_purged(
    world: World, removed: str
) -> None:
    world.minutes(1, 61)
    world.run("live").all()
    world.minutes(2)
    world.run("more").all()
    [path, _] = look(world.archive).hours[hour_of(NINE)]
    place = Path(world.store.root) / world.archive.path / path
    if removed == "file":
        place.unlink()
    else:
        shutil.rmtree(place.parent if removed == "hour" else place.parent.parent)

    report = world.backfill("again")

    gone = {"file": "1 file", "hour": "2 files", "day": "2 files"}[removed]
    assert f"{gone} of it are gone" in notes(report)
    assert report["totals"]["received"] == (1 if removed == "file" else 0)

    purge(world.archive, Interval(NINE, NINE + timedelta(hours=1)), datetime.now(UTC))
    assert "some of it was removed" in notes(world.backfill("purged"))
    assert "gone" not in notes(world.backfill("purged again"))
    assert hour_of(NINE) not in hours_of(world.archive)


@pytest.mark.parametrize("gone", range(8))
def test_who_dies_amid_a_removal_is_finished_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    # Given two executions, one of them with messages of two hours
    world.minutes(3, 61)
    world.run("live").all()
    world.minutes(4)
    world.run("more").all()
    calls = iter(range(gone))

    def removed(backend: Disk, path: str) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        Path(path).unlink()

    def removed_in_order(backend: Disk, path: str) -> None:
        for each in sorted(Path(path).glob("*.parquet")):
            removed(backend, str(each))
        shutil.rmtree(path)

    # When their removal dies after so many files
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "remove", removed)
        patched.setattr(Disk, "remove_tree", removed_in_order)
        with pytest.raises(KeyboardInterrupt):
            purge(world.archive, NINE_TO_ELEVEN, datetime.now(UTC))

    # Then the next one removes the rest
    purge(world.archive, NINE_TO_ELEVEN, datetime.now(UTC))
    assert (list(hours_of(world.archive)), world.archive.list("index")) == ([], [])


def test_an_hour_that_is_removed_while_it_is_archived_leaves_nothing_for_good(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an hour that is removed right before the index of messages in it is there
    def create(folder: Folder, path: str, text: str) -> bool:
        if path.startswith("index/"):
            purge(world.archive, NINE_TO_ELEVEN, datetime.now(UTC))
        return real(folder, path, text)

    real = Folder.create
    world.minutes(3, 61)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "create", create)
        world.run("live").all()
    assert look(world.archive).messages == 0

    # Then the next removal finds that index
    purge(world.archive, NINE_TO_ELEVEN, datetime.now(UTC))
    assert (list(hours_of(world.archive)), world.archive.list("index")) == ([], [])


def test_an_hour_whose_index_comes_while_its_mark_is_removed_leaves_nothing_for_good(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a removal that finds no index, which is put before the mark goes: both have looked
    real, remove, exists = Folder.create, Folder.remove, Folder.exists
    index: list[tuple[str, str]] = []

    def removed(folder: Folder, path: str) -> None:
        if path.startswith("hours/") and index:
            real(folder, *index.pop())
        remove(folder, path)

    def create(folder: Folder, path: str, text: str) -> bool:
        if not path.startswith("index/"):
            return real(folder, path, text)
        index.append((path, text))
        purge(world.archive, NINE_TO_ELEVEN, datetime.now(UTC))
        return True

    def there(folder: Folder, path: str) -> bool:
        return path.startswith("hours/") or exists(folder, path)

    world.minutes(3)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "create", create)
        patched.setattr(Folder, "remove", removed)
        patched.setattr(Folder, "exists", there)
        world.run("live").all()
    assert not index
    assert look(world.archive).messages == 0

    # Then the next removal finds that index
    purge(world.archive, NINE_TO_ELEVEN, datetime.now(UTC))
    assert (list(hours_of(world.archive)), world.archive.list("index")) == ([], [])


def test_an_archive_that_is_younger_or_an_interval_that_is_not_over_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, archive={"time": "received_at"})
    world.minutes(1)
    world.run("live").all()

    assert "the archive was begun only at" in notes(world.backfill("old"))
    from datetime import UTC, datetime

    now = datetime.now(UTC)
    source = RunSource(kind="archive", interval=Interval(now, now + timedelta(hours=2)))
    assert "it is not over yet" in notes(world.run("now", source).all())


def test_what_live_runs_have_not_settled_yet_is_told(world: World) -> None:
    world.minutes(1)
    world.run("live").all()
    world.minutes(2)
    world.run("slow").process()

    assert "1 execution of live runs are not settled yet" in notes(world.backfill("again"))


def test_what_live_runs_of_another_dag_have_not_settled_yet_is_told(world: World) -> None:
    """A Dag of its own may run past intervals, of what another one receives."""
    world.minutes(1)
    world.run("live").all()
    world.minutes(2)
    world.run("slow").process()

    again = world.run("again", of_minutes(0, 60))
    again.in_dag("daily")

    assert "1 execution of live runs are not settled yet" in notes(again.all())


def test_a_gap_is_refused_before_anything_is_handled_where_the_user_asks_for_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, archive={"on_gap": "refuse"})
    world.minutes(1)
    world.run("live").all()
    world.backfill("fine")

    with pytest.raises(RequestRefused, match=r"is not whole.*nothing is archived of it.*on_gap"):
        world.run("again", of_minutes(120, 180)).process()
    assert not world.run("again").staged.generations()


def test_an_archive_of_a_newer_version_is_one_clear_error(world: World) -> None:
    world.minutes(1)
    world.run("live").all()
    [name] = world.archive.list("index")
    index = json.loads(world.archive.read(f"index/{name}"))
    del index["seal"]
    world.archive.replace(f"index/{name}", json.dumps({**index, "version": 99}))

    with pytest.raises(StagingError, match="has format version 99; this release reads up to"):
        world.run("again", of_minutes(0, 60)).process()


# -- options ---------------------------------------------------------------------------------------


def test_a_past_source_has_the_options_of_the_pipelines_own(world: World) -> None:
    pipeline = world.pipeline("r")
    past = PastProducer(pipeline, of_minutes(0, 60))

    assert past.transformer is upper
    assert past.retry == pipeline.producer.retry
    assert (past.kind, past.renews, past.keeps_payload) == ("archive", False, False)


def test_only_the_first_of_several_producers_reads(world: World) -> None:
    world.minutes(1, 2)
    world.run("live").all()
    run = world.run("again", of_minutes(0, 60))

    assert run.process(1)["received"] == 0
    assert run.process(0)["received"] == 2


# -- the batches of a past run ---------------------------------------------------------------------


def of_run(run_id: str) -> RunSource:
    return RunSource(kind="run", run_id=run_id)


def test_a_past_run_is_run_again_with_its_own_batches(world: World) -> None:
    world.minutes(*range(10))
    world.run("past").all()
    # Though the options would make others by now
    world.ref["options"]["batchers"] = {"default": {"batch_size": 100}}

    report = world.run("again", of_run("past")).all()

    assert report["balanced"]
    assert report["totals"]["acked"] == report["totals"]["received"] == 10
    assert report["source"]["run_id"] == "past"
    past, again = world.sink("past"), world.sink("again")
    assert [(each["batch_id"], each["rows"]) for each in again] == [
        (each["batch_id"], each["rows"]) for each in past
    ]
    assert {each["source"] for each in again} == {"run"}
    with world.queue() as queue:
        assert queue.depth()[:4] == (0, 0, 0, 0)


def of_batches(run_id: str, *batch_ids: str) -> RunSource:
    return RunSource(kind="run", run_id=run_id, only={"batches": list(batch_ids)})


def test_only_the_batches_that_are_named_are_run_again(world: World) -> None:
    world.minutes(*range(10))
    world.run("past").all()
    first, *others = world.sink("past")
    assert others

    world.run("again", of_batches("past", first["batch_id"])).all()

    assert [batch["batch_id"] for batch in world.sink("again")] == [first["batch_id"]]


def test_what_was_never_handled_is_run_again_only_by_name(world: World) -> None:
    world.minutes(1, 2)
    run = world.run("past")
    run.process()
    task = BatchTask(run.staged, run.pipeline, run.task("batch"), run.ports, batcher="default")
    plan = task.plan(run.references, label="1")
    assert plan is not None
    [(_, batch)] = OpenPlans(run.staged, [plan.path]).open_batches()

    with pytest.raises(RequestRefused, match=r"return to the queue.*name them in source_batches"):
        world.run("again", of_run("past")).process()
    report = world.run("named", of_batches("past", batch.batch_id)).all()

    assert report["totals"]["acked"] == 2
    assert world.rows("named") == [1, 2]


class AtOnce(Minutes):
    """Minutes of which a batch is acknowledged before it has an outcome."""

    name = "Minutes"

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return ack_immediately(messages)


def test_a_callback_that_acks_at_once_acks_nothing_in_a_past_run(tmp_path: Path) -> None:
    world = World(tmp_path, AtOnce)
    world.minutes(1, 2)
    world.run("past").all()
    world.minutes(3)

    report = world.run("again", of_run("past")).all()

    assert report["balanced"]
    assert report["totals"]["acked"] == 2
    with world.queue() as queue:
        assert queue.depth()[:4] == (1, 0, 0, 0)


def until_mended(message: Message, count: int) -> tuple[str, int]:
    if (message.data["minute"], MENDED.is_set()) == (11, False):
        raise KeyError("no field")
    return ("cont", count + 1)


MENDED = threading.Event()


class Split(Minutes):
    """Minutes whose splitter raises on one of them until it is mended."""

    name = "Minutes"
    batchers = {"default": Batcher(engine="python", batch_size=(0, until_mended), max_demand=100)}


def test_a_batch_on_which_the_splitter_raised_is_handled_when_it_is_run_again(
    tmp_path: Path,
) -> None:
    MENDED.clear()
    world = World(tmp_path, Split)
    world.minutes(1, 11, 2)
    assert world.run("past").all()["totals"]["failed"] == 1
    assert world.rows("past") == [1, 2]
    MENDED.set()

    world.run("again", of_run("past")).all()

    assert sorted(world.rows("again")) == [1, 2, 11]


def test_of_a_backfill_that_was_made_twice_the_last_is_run_again(tmp_path: Path) -> None:
    # Given a day that was backfilled, and once more when its archive had grown
    world = World(tmp_path, Daily)
    for minutes in ((1, 2), (3,)):
        world.minutes(*minutes)
        world.run(f"live{minutes[0]}").all()
        world.run("day", of_minutes(0, 60)).all()
    assert written(world) == [1, 2, 3]

    report = world.run("again", of_run("day")).all()

    assert report["totals"]["acked"] == 3
    assert written(world) == [1, 2, 3]


def test_a_past_run_of_several_producers_is_one_generation_of_the_new_one(world: World) -> None:
    world.ref["options"]["processors"] = {"concurrency": 1, "max_demand": 2}
    run = world.run("past")
    for index, minutes in enumerate(((1, 2, 3), (4, 5, 6, 7, 8))):
        world.minutes(*minutes)
        run.process(index)
    run.batch()
    run.ack()

    again = world.run("again", of_run("past"))
    assert again.process(1)["received"] == 0
    assert again.process(0)["received"] == 8
    again.batch()
    report = again.ack()

    assert report["totals"]["acked"] == 8
    assert {each["batch_id"]: each["rows"] for each in world.sink("again")} == {
        each["batch_id"]: each["rows"] for each in world.sink("past")
    }


def test_a_past_run_whose_batch_was_split_is_run_again_in_the_same_parts(world: World) -> None:
    # Given a batch of two producers that was split, since processes died of it
    run = world.run("past")
    for index, minutes in enumerate(((1, 2, 3), (4,))):
        world.minutes(*minutes)
        run.process(index)
    made = BatchTask(run.staged, run.pipeline, run.task("batch"), run.ports, batcher="default")
    plan = made.plan(run.references, label="1")
    assert plan is not None
    [(head, batch)] = OpenPlans(run.staged, [plan.path]).open_batches()
    split(run.staged, head, batch, 2, by="the test")
    made.handle(plan)
    run.ack()

    report = world.run("again", of_run("past")).all()

    assert report["totals"]["acked"] == 4
    parts = [(each["batch_id"], each["rows"]) for each in world.sink("again")]
    assert parts == [(each["batch_id"], each["rows"]) for each in world.sink("past")]
    assert [len(rows) for _, rows in parts] == [2, 2]


def test_a_past_run_that_was_cleared_midway_has_plans_that_are_joined(world: World) -> None:
    world.minutes(1, 2)
    run = world.run("past")
    run.process()
    run.batch()
    run.references.clear()
    world.minutes(3, 4, 5)
    run.process()
    run.batch()
    run.ack()

    report = world.run("again", of_run("past")).all()

    assert report["balanced"]
    assert sorted(world.rows("again")) == sorted(world.rows("past"))


def test_what_cannot_be_run_again_is_refused(world: World) -> None:
    with pytest.raises(RequestRefused, match="there is no staged run 'past'"):
        world.run("again", of_run("past")).process()
    world.minutes(1)
    run = world.run("past")
    run.process()
    with pytest.raises(RequestRefused, match="has no staged batches"):
        world.run("again", of_run("past")).process()
    run.batch()
    run.ack()
    with pytest.raises(RequestRefused, match="has no batch nothing"):
        world.run("again", of_batches("past", "nothing")).process()
    batchers = world.ref["options"].get("batchers")
    world.ref["options"]["batchers"] = {"default": {"engine": "spark"}}
    with pytest.raises(RequestRefused, match="were staged for engine='python'"):
        world.run("again", of_run("past")).process()
    world.ref["options"]["batchers"] = batchers or {}
    for data in (world.folder / "staging").rglob("past/batches/**/*.parquet"):
        data.unlink()
    with pytest.raises(RequestRefused, match="the staged data of run 'past' is missing"):
        world.run("again", of_run("past")).process()


# -- the sink --------------------------------------------------------------------------------------


class Daily(Minutes):
    """The worked example of ``docs/backfills.md``: a backfill owns the folder of rows."""

    name = "Minutes"

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        folder = Path(batch_info.path(f"{context['sink']}/rows"))
        folder.mkdir(parents=True, exist_ok=True)
        rows = [f"{each.message_id},{each.data['minute']}" for each in messages]
        (folder / "rows.csv").write_text("\n".join(rows))
        return messages

    def prepare_backfill(self, interval: Interval, context: Any) -> None:
        calls = Path(context["sink"]) / "prepared"
        calls.parent.mkdir(parents=True, exist_ok=True)
        calls.write_text(f"{interval}\n" + (calls.read_text() if calls.exists() else ""))
        shutil.rmtree(Path(context["sink"]) / "rows", ignore_errors=True)


def written(world: World) -> list[int]:
    files = (world.folder / "sink" / "rows").glob("*/rows.csv")
    return sorted(
        int(line.partition(",")[2]) for each in files for line in each.read_text().split()
    )


def prepared(world: World) -> int:
    path = world.folder / "sink" / "prepared"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_backfill_over_what_live_runs_wrote_leaves_each_row_once(tmp_path: Path) -> None:
    world = World(tmp_path, Daily)
    for minutes in ((5, 1), (3, 2, 4)):
        world.minutes(*minutes)
        world.run(f"live{minutes[0]}").all()
    assert prepared(world) == 0
    assert written(world) == [1, 2, 3, 4, 5]

    for number, run_id in enumerate(("one", "two"), 1):
        world.backfill(run_id)
        assert written(world) == [1, 2, 3, 4, 5]
        assert prepared(world) == number


def test_a_batch_that_is_tried_again_does_not_prepare_the_sink_anew(tmp_path: Path) -> None:
    world = World(tmp_path, Daily)
    world.minutes(1, 2)
    world.run("live").all()
    run = world.run("again", of_minutes(0, 60))
    run.process()
    run.batch()
    run.batch()
    run.ack()

    assert prepared(world) == 1
    assert written(world) == [1, 2]


def test_an_interval_without_messages_is_prepared_too(tmp_path: Path) -> None:
    world = World(tmp_path, Daily)
    world.minutes(1)
    world.run("live").all()

    world.backfill("empty", 30, 40)

    assert prepared(world) == 1
    assert written(world) == []


def test_an_execution_that_was_given_up_touches_no_sink(tmp_path: Path) -> None:
    world = World(tmp_path, Daily)
    run = world.run("again", of_minutes(0, 60))
    served = with_source(run.pipeline, run.source)
    env = replace(ProducerEnv(), generation="0" * 32, store=world.store)
    run.staged.files.replace(f"{'0' * 32}/journal-intent.json", "{}")

    with pytest.raises(LeaseLapsed, match="abandoned before its sink was prepared"):
        prepare_sink(run.staged, served, env)
    assert prepared(world) == 0


def test_one_producer_cleared_alone_does_not_undo_the_batches_of_others(tmp_path: Path) -> None:
    world = World(tmp_path, Daily)
    world.minutes(1, 2)
    world.run("live").all()
    run = world.run("again", of_minutes(0, 60))
    run.process()
    run.batch()

    with pytest.raises(PipelineError, match="clear all process tasks of the run together"):
        prepare_sink(
            run.staged,
            with_source(run.pipeline, run.source),
            replace(ProducerEnv(), generation="0" * 32, owner={"map_index": 7}, store=world.store),
        )


def test_the_batches_of_several_live_producers_are_prepared_for_as_well(tmp_path: Path) -> None:
    # Given a scheduled run of two producers
    world = World(tmp_path, Daily)
    day = world.run("day")
    for index, minutes in enumerate(((1, 2), (3, 4))):
        world.minutes(*minutes)
        day.process(index)
    day.batch()
    day.ack()

    # When Airflow makes it the backfill of its day
    again = world.run("day", of_minutes(0, 60))
    again.process(0)
    again.process(1)
    again.batch()
    again.ack()

    assert prepared(world) == 1
    assert written(world) == [1, 2, 3, 4]


def test_a_run_that_goes_on_with_the_rest_of_a_log_keeps_what_it_wrote(tmp_path: Path) -> None:
    # Given a live run, and a run of a log's interval that left something.  Here the queue stands
    # for the log: whoever reads it again finds what is left.
    world = World(tmp_path, Daily)
    log = RunSource(kind=LOG, interval=of_minutes(0, 60).interval)
    world.minutes(1, 2)
    world.run("day").all()
    world.minutes(1, 2, 3)
    world.run("day", log).all()
    assert written(world) == [1, 2, 3]

    # When it is cleared
    world.minutes(4)
    world.run("day", log).all()

    # Then it goes on, and the past run that it is has all of its batches, but for the live one's
    assert prepared(world) == 1
    assert written(world) == [1, 2, 3, 4]
    report = world.run("again", of_run("day")).all()
    assert report["totals"]["acked"] == 4


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        "airflow_broadway.staging.archive.publication._publish_file",
        "airflow_broadway.staging.archive.publication._record_begin",
        "airflow_broadway.staging.archive.publication._write_index",
        "airflow_broadway.staging.settling.settlement.record_settled",
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_a_settlement_killed_while_it_archives_is_gone_on_with(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str, after: bool
) -> None:
    # Given a run that settles three messages, one of which comes again, and is killed
    world.send({"minute": 1}, {"minute": 61}, {"minute": 2, "fails": "batch"})
    run = world.run("killed")
    run.process()
    with monkeypatch.context() as patch:
        struck = resolve_name(point)

        def dies(*given: Any, **named: Any) -> None:
            if after:
                struck(*given, **named)
            raise KeyboardInterrupt

        patch.setattr(point, dies)
        patch.setattr(RunWatcher, "settle_unwatched", lambda self: None)
        run.batch()
        with pytest.raises(KeyboardInterrupt):
            run.ack()
    world.over.add("killed")

    # When the next runs sweep, and handle what is left
    world.run("next").all()
    world.run("last").all()

    # Then each message is in the archive once
    assert look(world.archive).messages == 3
    assert len({*world.archive.list("index")}) == 2
    world.run("again", of_minutes(0, 120)).all()
    assert sorted(world.rows("again")) == [1, 2, 61]
    with world.queue() as queue:
        assert queue.depth()[:3] == (0, 0, 0)


@pytest.mark.parametrize(
    "point",
    [
        "airflow_broadway.runs.process.prepare_sink",
        "airflow_broadway.runs.process.Process._publish",
        "airflow_broadway.runs.python_batches.PythonBatches._handle",
        "airflow_broadway.runs.sources.archived.put_failed",
        "airflow_broadway.staging.settling.settlement.record_settled",
    ],
)
def test_a_backfill_killed_on_its_way_is_tried_again_and_leaves_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    world = World(tmp_path, Daily)
    world.send({"minute": 1}, {"minute": 2}, {"minute": 3, "fails": "process"})
    for run_id in ("live", "live2"):
        world.run(run_id).all()
    run = world.run("again", of_minutes(0, 60))
    monkeypatch.setattr(
        "airflow_broadway.runs.watch.RunWatcher.settle_unwatched", lambda self: None
    )

    def all_tasks() -> dict[str, Any]:
        run.references.clear()
        run.process()
        run.batch()
        return run.ack()

    with monkeypatch.context() as patch:
        patch.setattr(point, _dies)
        with pytest.raises(KeyboardInterrupt):
            all_tasks()

    # Airflow clears it: every task from the first
    report = all_tasks()

    assert report["balanced"]
    assert written(world) == [1, 2]
    assert [each["reason"] for each in failures(world.archive)].count("sour") >= 1
    assert report["totals"]["acked"] >= 2


def test_a_message_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    # Given an archive by receipt, and a lease that lapsed: a broker delivers what it had settled
    world = World(tmp_path)
    for run_id, minute in (("one", 1), ("two", 1), ("three", 61)):
        with world.queue() as queue:
            queue.send([json.dumps({"minute": minute}).encode()])
        run = world.run(run_id)
        run.all()
    rename_messages(world, "same")

    # When an interval that has all of them is run again
    report = world.run("again", of_minutes(0, 120)).all()

    # Then it is there once: the first by its time
    assert report["totals"]["received"] == 1
    assert world.rows("again") == [1]


def rename_messages(world: World, key: str) -> None:
    """Give all archived messages one id, as delivered again."""
    for files in look(world.archive).hours.values():
        for path in files:
            place = Path(world.store.root) / world.archive.path / path
            table = pq.read_table(place)
            for name, column in (
                ("message_id", pa.repeat(key, len(table))),
                ("redelivered", pa.repeat(True, len(table))),
            ):
                index = table.column_names.index(name)
                table = table.set_column(index, table.schema.field(index), column)
            place.unlink()
            pq.write_table(table, place)


def test_a_dead_letter_that_came_again_with_another_id_is_read_by_that_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a dead letter that is sent once more, and a message that says it was another one
    world.send({"minute": 1, "fails": "process"}, {"minute": 2})
    for _ in range(2):  # it has two attempts
        world.run("dead").all()
    with world.queue() as queue:
        [letter] = queue.dead_letters(limit=None)
        again, forged = queue.send([letter.body, b'{"minute": 3}'])
    taken = world.run("taken")
    taken.process()
    world.over.add("taken")
    [[[other, _]]] = [batch["rows"] for batch in world.sink("dead")]
    said = {again: letter.message_id, forged: other}

    def sent_back_as(producer: Any, message: Message) -> str | None:
        return said.get(message.message_id)

    monkeypatch.setattr(SqliteProducer, "sent_back_as", sent_back_as)
    world.run("live").all()
    assert look(world.archive).messages == 4

    # When the interval is read
    interval = of_minutes(0, 60).interval
    assert interval is not None
    found = look(world.archive)
    rows = [row for table in tables(world.archive, found, interval) for row in table.to_pylist()]

    # Then the same message is there once, as it came the last time; nobody hides another one
    assert [json.loads(row["payload"])["minute"] for row in rows] == [1, 2, 3]
    assert (rows[0]["message_id"], rows[0]["was"]) == (again, letter.message_id)
    # And where the later one was removed, but not all of its execution, the first is read again
    [name] = world.archive.list("again")
    [gone] = [path for path in found.hours[hour_of(NINE)] if name.partition("-")[0] in path]
    place = Path(world.store.root) / world.archive.path / gone
    kept = place.read_bytes()
    place.unlink()
    rest = tables(world.archive, look(world.archive, interval), interval)
    assert sum(table.num_rows for table in rest) == 2
    place.write_bytes(kept)
    # And what was removed says nothing any more, to whoever reads meanwhile, and afterwards
    left = name.rpartition("-")[0] + "-left.jsonl"  # by somebody who died while it settled
    world.archive.create(f"again/{left}", "")
    real = Folder.read

    def read(folder: Folder, path: str) -> str:
        if path == f"again/{name}":
            raise FileNotFoundError(path)
        return real(folder, path)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "read", read)
        assert sum(table.num_rows for table in tables(world.archive, found, interval)) == 4
    purge(world.archive, Interval(NINE, NINE + timedelta(hours=1)), datetime.now(UTC))
    assert world.archive.list("again") == []


def test_a_live_run_that_airflow_makes_a_backfill_reads_the_archive(world: World) -> None:
    world.minutes(1, 2, 61)
    world.run("day").all()

    report = world.run("day", of_minutes(0, 60)).all()

    assert report["balanced"]
    assert report["totals"]["acked"] == 5
    assert report["source"]["kind"] == "archive"
    assert sorted(each["source"] for each in world.sink("day")) == ["archive", "live"]


def test_a_live_run_that_failed_and_that_airflow_makes_a_backfill_gives_back_what_it_held(
    world: World,
) -> None:
    # Given an archive, and a scheduled run that failed after it had taken a message
    world.minutes(1, 2)
    world.run("before").all()
    world.minutes(3)
    world.run("day").process()

    # When Airflow reprocesses what failed
    report = world.run("day", of_minutes(0, 60)).all()

    # Then it reads the archive, and the message is in the queue again
    assert report["balanced"]
    assert report["source"]["kind"] == "archive"
    assert world.rows("day") == [1, 2]
    with world.queue() as queue:
        assert queue.depth()[0] == 1
    world.run("next").all()
    assert world.rows("next") == [3]
    assert look(world.archive).messages == 3
