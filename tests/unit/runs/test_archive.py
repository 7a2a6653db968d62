"""The archive keeps the messages of settled runs, and intervals of it can be run again."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from deltalake import DeltaTable

from airflow_broadway import Archive, Batcher, Interval, Message, RunSource, ack_immediately
from airflow_broadway.core.custody.dead_letters import DeadLetter
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import LeaseLapsed, PipelineError, RequestRefused, StagingError
from airflow_broadway.core.model.run_source import LOG
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.sources.archived import PastProducer
from airflow_broadway.runs.sources.pipelines import prepare_sink, with_source
from airflow_broadway.runs.tasks import BatchTask, ProcessTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.archive.letters import ArchiveLetters
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.archive.table import hour_of, maintain, purge
from airflow_broadway.staging.isolation import split
from tests.unit.runs.archive_steps import NINE, Minutes, World, of_minutes, upper
from tests.unit.runs.steps import balanced

NINE_TO_ELEVEN = Interval(NINE, NINE + timedelta(hours=2))


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_backfill_receives_messages_as_first_delivered(world):
    # Given messages that live runs handled, out of order
    world.live(7, 3, 65, 5)

    # When an hour of them is run again
    report = world.backfill("again")

    # Then callbacks get the same batches, with the archive as their source
    assert balanced(report)["received"] == report["totals"]["acked"] == 3
    [batch] = world.sink("again")
    assert [minute for _, minute in batch["rows"]] == [3, 5, 7]
    assert batch["source"] == "archive"
    assert batch["interval"] == str(of_minutes(0, 60).interval)
    assert batch["redelivered"] == 3
    live = {row[1]: row[0] for batch in world.sink("live") for row in batch["rows"]}
    assert {minute: key for key, minute in batch["rows"]} == {
        minute: live[minute] for minute in (3, 5, 7)
    }
    # And of a part of the hour those from its start to before its end
    world.backfill("part", 3, 5)
    assert world.rows("part") == [3]
    # And nothing was received from the queue
    assert world.depth() == (0, 0, 0, 0, None)


def test_two_backfills_make_identical_batches(world):
    for minutes in ((9, 1, 8), (2, 7), (3, 6, 4, 5)):
        world.live(*minutes, run_id=f"live{minutes[0]}")

    world.backfill("first")
    world.ref["options"]["processors"] = {"concurrency": 3, "max_demand": 2}
    world.backfill("second")

    first, second = world.sink("first"), world.sink("second")
    assert world.rows("first") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [(call["batch_id"], call["rows"]) for call in first] == [
        (call["batch_id"], call["rows"]) for call in second
    ]
    assert len(first) == 3


def test_archive_order_survives_partitioned_processors(tmp_path):
    world = World(tmp_path, Parted)
    world.live(*range(20))

    world.backfill("again")

    assert world.rows("again") == list(range(20))


class Parted(Minutes):
    @staticmethod
    def partition_by(message: Message) -> int:
        return len(message.message_id) + int(message.message_id[-1], 36)


def test_messages_are_archived_together_at_settlement(world):
    world.minutes(1, 61, 2)
    run = world.run("live")
    run.process()
    assert look(world.archive).messages == 0

    run.batch()
    run.ack()

    listing = look(world.archive)
    assert listing.messages == 3
    assert [sum(files.values()) for files in listing.hours.values()] == [2, 1]


def test_redelivered_message_is_archived_by_settling_run(world):
    # Given a message that fails and is retried, and one that is released
    world.send({"minute": 1, "fails": "batch"}, {"minute": 2})
    world.run("one").all()
    assert look(world.archive).messages == 1
    world.run("two").process()  # and no more: its message goes back
    world.over.add("two")

    # When later runs settle them for good
    world.run("three").all()
    world.run("four").all()

    # Then the archive has both once
    assert look(world.archive).messages == 2
    world.backfill("again")
    assert world.rows("again") == [1, 2]


@pytest.mark.parametrize("damaged", ["manifest.json", "failed-*.jsonl"])
def test_damaged_file_leaves_nothing_unarchived_or_unsettled(world, damaged):
    # Given a run that ended without an account
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
    assert [generation.state for generation in dead.staged.generations()] == ["settled"]
    assert look(world.archive).messages == 2
    # And no message was counted as deadly
    assert not list((world.folder / "staging").rglob("deaths/*"))


def test_missing_client_is_one_clear_error_before_messages_are_received(world, monkeypatch):
    world.minutes(1)
    monkeypatch.setitem(sys.modules, "deltalake", None)

    with pytest.raises(StagingError, match=r"archive needs deltalake.*airflow-broadway\[delta\]"):
        world.run("live").process()
    assert world.depth()[:3] == (1, 0, 0)


def test_folder_that_the_client_cannot_open_is_one_clear_error(tmp_path):
    folder = tmp_path / "50%"
    folder.mkdir()
    world = World(folder)
    world.minutes(1)

    with pytest.raises(StagingError, match=r"percent sign: an archive needs another staging"):
        world.run("live").process()
    assert world.depth()[:3] == (1, 0, 0)


def test_run_without_manifest_archives_nothing(world, monkeypatch):
    world.minutes(1, 2)
    monkeypatch.setattr("airflow_broadway.runs.process.Process._publish", _dies)
    with pytest.raises(KeyboardInterrupt):
        world.run("dead").process()
    monkeypatch.undo()

    world.run("live").all()

    assert look(world.archive).messages == 2


def _dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_backfill_failures_are_kept_next_to_archive(world):
    world.send({"minute": 1}, {"minute": 2, "fails": "process"}, {"minute": 3, "fails": "batch"})
    for run_id in ("one", "two"):
        world.run(run_id).all()

    report = world.backfill("again")

    assert report["totals"]["dead_lettered"] == 2
    assert balanced(report)["acked"] == 1
    by_reason = {letter.reason: letter for letter in failures(world)}
    assert {reason: letter.stage for reason, letter in by_reason.items()} == {
        "sour": "process",
        "spilt": "batch",
    }
    assert {letter.origin for letter in by_reason.values()} == {"run again of d"}
    sour = by_reason["sour"]
    assert sour.properties["time"] == (NINE + timedelta(minutes=2)).isoformat()
    assert json.loads(sour.body) == {"minute": 2, "fails": "process"}
    # Settling it once more writes the same.
    world.run("again", of_minutes(0, 60)).ack()
    assert len(failures(world)) == 2


def failures(world: World) -> list[DeadLetter]:
    return list(ArchiveLetters(world.archive).letters())


def test_cleared_backfill_reads_again_and_writes_the_same(world):
    world.live(1, 2, 3)
    run = world.run("again", of_minutes(0, 60))
    run.process()
    run.references.clear()
    run.process()
    run.batch()
    report = run.ack()

    assert report["totals"]["released"] == 3
    assert report["totals"]["acked"] == 3
    assert world.rows("again") == [1, 2, 3]


def test_live_runs_sweep_backfills_but_not_vice_versa(world):
    world.live(1)
    world.minutes(2)
    world.run("dead").process()
    world.run("past", of_minutes(0, 60)).process()
    world.over |= {"dead", "past"}

    world.backfill("again")
    assert world.depth().leased == 1

    world.run("live2").all()
    assert world.depth()[:3] == (0, 0, 0)
    dead = world.run("past").staged
    assert [generation.state for generation in dead.generations()] == ["settled"]


def test_partially_read_interval_settles_nothing(world):
    world.live(1, 2, 3)
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

    assert [generation.state for generation in run.staged.generations()] == ["settled"]


def test_messages_without_timestamp_are_kept_and_reported(world):
    world.send({"minute": 1}, {"minute": "soon"}, {"minute": "late"})
    world.run("live").all()

    listing = look(world.archive)
    assert listing.messages == 3
    [(why, count)] = listing.untimed.items()
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
def test_invalid_timestamp_is_reported_as_untimed(tmp_path, gives, why):
    class Odd(Minutes):
        name = "Minutes"
        archive = Archive(time=lambda message: gives)

    world = World(tmp_path)
    run = world.run("live")
    run.pipeline.archive = Odd.archive
    world.minutes(1)
    run.all()

    [untimed] = look(world.archive).untimed
    assert untimed.startswith(why)


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (datetime(1, 1, 1, tzinfo=UTC), ""),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), ""),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5))), "OverflowError"),
        (datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5))), "OverflowError"),
    ],
)
def test_first_and_last_timestamps_are_kept(tmp_path, gives, why):
    """Other systems write "unknown" and "never" so; a year has four digits all the same."""
    world = World(tmp_path)
    run = world.run("live")
    run.pipeline.archive = Archive(time=lambda message: gives)
    world.minutes(1)
    run.all()

    listing = look(world.archive)
    assert listing.messages == 1
    assert [text.partition(":")[0] for text in listing.untimed] == ([why] if why else [])


def test_archive_by_enqueued_at_uses_broker_timestamp(tmp_path):
    world = World(tmp_path, archive={"time": "enqueued_at"}, pipeline=Minutes)
    world.live(1)

    listing = look(world.archive)
    assert listing.messages == 1
    assert not listing.untimed


# -- gaps ------------------------------------------------------------------------------------------


def notes(report: dict[str, Any]) -> str:
    return "; ".join(report["notes"])


def test_missing_part_of_interval_is_reported(world):
    assert "nothing was archived yet" in notes(world.backfill("early"))
    world.live(1)

    assert notes(world.backfill("fine")) == ""
    assert "nothing is archived of it" in notes(world.backfill("none", 120, 180))
    [path] = look(world.archive).hours[hour_of(NINE)]
    other = Path(world.store.root) / world.archive.path / path
    other.with_name(other.name.replace("00000", "00001")).write_bytes(other.read_bytes())
    other.unlink()
    assert "it lacks 1 file" in notes(world.backfill("lost"))


@pytest.mark.parametrize("removed", ["hour", "day", "file"])
def test_manually_removed_files_are_a_gap_until_purged(world, removed):
    world.live(1, 61)
    world.live(2, run_id="more")
    [path, _] = look(world.archive).hours[hour_of(NINE)]
    place = Path(world.store.root) / world.archive.path / path
    if removed == "file":
        place.unlink()
    else:
        shutil.rmtree(place.parent if removed == "hour" else place.parent.parent)

    report = world.backfill("again")

    missing = {"file": "1 file", "hour": "2 files", "day": "2 files"}[removed]
    assert f"it lacks {missing}" in notes(report)
    assert report["totals"]["received"] == (1 if removed == "file" else 0)

    purge(world.archive, Interval(NINE, NINE + timedelta(hours=1)))
    assert "some of it was removed" in notes(world.backfill("purged"))
    assert "gone" not in notes(world.backfill("purged again"))
    assert hour_of(NINE) not in look(world.archive).hours


@pytest.mark.parametrize("point", ["_record_removal", "_remove_files", "files_by_hour"])
@pytest.mark.parametrize("after", [False, True])
def test_interrupted_removal_is_completed_by_next_purge(world, monkeypatch, point, after):
    # Given two executions, one of them with messages of two hours
    world.live(3, 61)
    world.live(4, run_id="more")
    name = f"airflow_broadway.staging.archive.table.{point}"
    with monkeypatch.context() as patched:
        patched.setattr(name, killed(name, after=after))
        with pytest.raises(KeyboardInterrupt):
            purge(world.archive, NINE_TO_ELEVEN)

    # Then the next one removes the rest
    purge(world.archive, NINE_TO_ELEVEN)
    assert look(world.archive).hours == {}
    assert "some of it was removed" in notes(world.backfill("again"))
    # And files that are left go with a later retention
    monkeypatch.setattr("airflow_broadway.staging.archive.table._UNUSED_HOURS", 0)
    world.live(5, run_id="old")
    maintain(world.archive, 1.0, datetime.now(UTC))
    assert parquet_files(world) == []


def killed(name: str, *, after: bool) -> Any:
    """The function of that name, but its caller is killed before it has run, or afterwards."""
    struck = resolve_name(name)

    def dies(*args: Any, **kwargs: Any) -> None:
        if after:
            struck(*args, **kwargs)
        raise KeyboardInterrupt

    return dies


def parquet_files(world: World) -> list[Path]:
    return sorted(place_of(world).glob("date=*/hour=*/*.parquet"))


def test_hour_removed_during_archiving_has_its_later_messages(world, monkeypatch):
    # Given an hour that is removed right before messages of it are appended
    def commit(archive, change, table=None):
        if "append" in change.__qualname__ and not struck:
            struck.append(True)
            purge(archive, NINE_TO_ELEVEN)
        return real(archive, change, table)

    struck: list[bool] = []
    real = resolve_name("airflow_broadway.staging.archive.table._commit")
    world.live(3, 61)
    world.minutes(4, 62)
    with monkeypatch.context() as patched:
        patched.setattr("airflow_broadway.staging.archive.table._commit", commit)
        world.run("late").all()

    # Then they are there once, though their commit was refused first, and the next removal has them
    assert look(world.archive).messages == 2
    purge(world.archive, NINE_TO_ELEVEN)
    assert look(world.archive).hours == {}
    assert parquet_files(world) == []


def test_younger_archive_and_unfinished_interval_are_reported(tmp_path):
    world = World(tmp_path, archive={"time": "received_at"})
    world.live(1)

    assert "the archive was begun only at" in notes(world.backfill("old"))
    from datetime import UTC, datetime

    now = datetime.now(UTC)
    source = RunSource(kind="archive", interval=Interval(now, now + timedelta(hours=2)))
    assert "it is not over yet" in notes(world.run("now", source).all())


def test_unsettled_live_runs_are_reported(world):
    world.live(1)
    world.minutes(2)
    world.run("slow").process()

    assert "1 execution of live runs are not settled yet" in notes(world.backfill("again"))


def test_unsettled_live_runs_of_another_dag_are_reported(world):
    """Another Dag may run past intervals of a pipeline's archive."""
    world.live(1)
    world.minutes(2)
    world.run("slow").process()

    again = world.run("again", of_minutes(0, 60))
    again.in_dag("daily")

    assert "1 execution of live runs are not settled yet" in notes(again.all())


def test_gap_is_refused_before_handling_if_requested(tmp_path):
    world = World(tmp_path, archive={"on_gap": "refuse"})
    world.live(1)
    world.backfill("fine")

    with pytest.raises(RequestRefused, match=r"is not whole.*nothing is archived of it.*on_gap"):
        world.run("again", of_minutes(120, 180)).process()
    assert not world.run("again").staged.generations()


def test_newer_archive_version_is_one_clear_error(world):
    world.live(1)
    table = DeltaTable(place_of(world))
    table.alter.set_table_properties({"airflow_broadway.version": "99"}, raise_if_not_exists=False)

    with pytest.raises(StagingError, match="has format version 99; this release reads up to"):
        world.run("again", of_minutes(0, 60)).process()


def place_of(world: World) -> Path:
    return Path(world.store.root, world.archive.path)


# -- options ---------------------------------------------------------------------------------------


def test_past_source_inherits_producer_options(world):
    pipeline = world.pipeline("r")
    past = PastProducer(pipeline, of_minutes(0, 60))

    assert past.transformer is upper
    assert past.retry == pipeline.producer.retry
    assert (past.kind, past.renews, past.keeps_payload) == ("archive", False, False)


def test_only_first_producer_reads_the_archive(world):
    world.live(1, 2)
    run = world.run("again", of_minutes(0, 60))

    assert run.process(1)["received"] == 0
    assert run.process(0)["received"] == 2


# -- the batches of a past run ---------------------------------------------------------------------


def of_run(run_id: str) -> RunSource:
    return RunSource(kind="run", run_id=run_id)


def test_past_run_is_rerun_with_its_own_batches(world):
    world.live(*range(10), run_id="past")
    # Though the options would make others by now
    world.ref["options"]["batchers"] = {"default": {"batch_size": 100}}

    report = world.run("again", of_run("past")).all()

    assert balanced(report)["acked"] == report["totals"]["received"] == 10
    assert report["source"]["run_id"] == "past"
    past, again = world.sink("past"), world.sink("again")
    assert [(call["batch_id"], call["rows"]) for call in again] == [
        (call["batch_id"], call["rows"]) for call in past
    ]
    assert {call["source"] for call in again} == {"run"}
    assert world.depth()[:4] == (0, 0, 0, 0)


def of_batches(run_id: str, *batch_ids: str) -> RunSource:
    return RunSource(kind="run", run_id=run_id, only={"batches": list(batch_ids)})


def test_only_named_batches_are_rerun(world):
    world.live(*range(10), run_id="past")
    first, *others = world.sink("past")
    assert others

    world.run("again", of_batches("past", first["batch_id"])).all()

    assert [batch["batch_id"] for batch in world.sink("again")] == [first["batch_id"]]


def test_unhandled_batches_are_rerun_only_by_name(world):
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


def test_immediate_acks_settle_nothing_in_a_past_run(tmp_path):
    world = World(tmp_path, AtOnce)
    world.live(1, 2, run_id="past")
    world.minutes(3)

    report = world.run("again", of_run("past")).all()

    assert balanced(report)["acked"] == 2
    assert world.depth()[:4] == (1, 0, 0, 0)


def until_mended(message: Message, count: int) -> tuple[str, int]:
    if (message.data["minute"], MENDED.is_set()) == (11, False):
        raise KeyError("no field")
    return ("cont", count + 1)


MENDED = threading.Event()


class Split(Minutes):
    """Minutes whose splitter raises on one of them until it is fixed."""

    name = "Minutes"
    batchers = {"default": Batcher(engine="python", batch_size=(0, until_mended), max_demand=100)}


def test_batch_failed_by_splitter_is_handled_on_rerun(tmp_path):
    MENDED.clear()
    world = World(tmp_path, Split)
    world.minutes(1, 11, 2)
    assert world.run("past").all()["totals"]["failed"] == 1
    assert world.rows("past") == [1, 2]
    MENDED.set()

    world.run("again", of_run("past")).all()

    assert sorted(world.rows("again")) == [1, 2, 11]


def test_last_of_two_backfills_is_rerun(tmp_path):
    # Given a day that was backfilled, and once more when its archive had grown
    world = World(tmp_path, Daily)
    for minutes in ((1, 2), (3,)):
        world.live(*minutes, run_id=f"live{minutes[0]}")
        world.run("day", of_minutes(0, 60)).all()
    assert written(world) == [1, 2, 3]

    report = world.run("again", of_run("day")).all()

    assert report["totals"]["acked"] == 3
    assert written(world) == [1, 2, 3]


def test_past_run_of_several_producers_is_one_generation(world):
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
    assert {batch["batch_id"]: batch["rows"] for batch in world.sink("again")} == {
        batch["batch_id"]: batch["rows"] for batch in world.sink("past")
    }


def test_past_run_with_split_batch_is_rerun_in_the_same_parts(world):
    # Given a batch of two producers that was split, since processes died of it
    run = world.run("past")
    for index, minutes in enumerate(((1, 2, 3), (4,))):
        world.minutes(*minutes)
        run.process(index)
    batch_task = BatchTask(
        run.staged, run.pipeline, run.task("batch"), run.ports, batcher="default"
    )
    plan = batch_task.plan(run.references, label="1")
    assert plan is not None
    [(head, batch)] = OpenPlans(run.staged, [plan.path]).open_batches()
    split(run.staged, head, batch, 2, by="the test")
    batch_task.handle(plan)
    run.ack()

    report = world.run("again", of_run("past")).all()

    assert report["totals"]["acked"] == 4
    parts = [(batch["batch_id"], batch["rows"]) for batch in world.sink("again")]
    assert parts == [(batch["batch_id"], batch["rows"]) for batch in world.sink("past")]
    assert [len(rows) for _, rows in parts] == [2, 2]


def test_plans_of_a_cleared_past_run_are_joined(world):
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


def test_past_run_that_cannot_be_rerun_is_refused(world):
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
        rows = [f"{message.message_id},{message.data['minute']}" for message in messages]
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
        int(line.partition(",")[2]) for file in files for line in file.read_text().split()
    )


def prepared(world: World) -> int:
    path = world.folder / "sink" / "prepared"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_backfill_over_live_rows_leaves_each_row_once(tmp_path):
    world = World(tmp_path, Daily)
    for minutes in ((5, 1), (3, 2, 4)):
        world.live(*minutes, run_id=f"live{minutes[0]}")
    assert prepared(world) == 0
    assert written(world) == [1, 2, 3, 4, 5]

    for number, run_id in enumerate(("one", "two"), 1):
        world.backfill(run_id)
        assert written(world) == [1, 2, 3, 4, 5]
        assert prepared(world) == number


def test_retried_batch_does_not_prepare_the_sink_again(tmp_path):
    world = World(tmp_path, Daily)
    world.live(1, 2)
    run = world.run("again", of_minutes(0, 60))
    run.process()
    run.batch()
    run.batch()
    run.ack()

    assert prepared(world) == 1
    assert written(world) == [1, 2]


def test_empty_interval_is_prepared_too(tmp_path):
    world = World(tmp_path, Daily)
    world.live(1)

    world.backfill("empty", 30, 40)

    assert prepared(world) == 1
    assert written(world) == []


def test_abandoned_execution_touches_no_sink(tmp_path):
    world = World(tmp_path, Daily)
    run = world.run("again", of_minutes(0, 60))
    served = with_source(run.pipeline, run.source)
    env = replace(ProducerEnv(), generation="0" * 32, store=world.store)
    run.staged.files.replace(f"{'0' * 32}/journal-intent.json", "{}")

    with pytest.raises(LeaseLapsed, match="abandoned before its sink was prepared"):
        prepare_sink(run.staged, served, env)
    assert prepared(world) == 0


def test_clearing_one_producer_alone_is_refused(tmp_path):
    world = World(tmp_path, Daily)
    world.live(1, 2)
    run = world.run("again", of_minutes(0, 60))
    run.process()
    run.batch()

    with pytest.raises(PipelineError, match="clear all process tasks of the run together"):
        prepare_sink(
            run.staged,
            with_source(run.pipeline, run.source),
            replace(ProducerEnv(), generation="0" * 32, owner={"map_index": 7}, store=world.store),
        )


def test_backfill_of_several_live_producers_prepares_the_sink(tmp_path):
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


def test_run_continuing_a_log_keeps_its_rows(tmp_path):
    # Given a live run, and a run of a log's interval that left something.  Here the queue stands
    # for the log: whoever reads it again finds what is left.
    world = World(tmp_path, Daily)
    log = RunSource(kind=LOG, interval=of_minutes(0, 60).interval)
    world.live(1, 2, run_id="day")
    world.minutes(1, 2, 3)
    world.run("day", log).all()
    assert written(world) == [1, 2, 3]

    # When it is cleared
    world.minutes(4)
    world.run("day", log).all()

    # Then it goes on, and the past run that it is has all of its batches, but for the live one's
    assert prepared(world) == 1
    assert written(world) == [1, 2, 3, 4]
    assert world.run("again", of_run("day")).all()["totals"]["acked"] == 4


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        "airflow_broadway.staging.archive.publication._place_file",
        "airflow_broadway.staging.archive.publication.append",
        "airflow_broadway.staging.archive.table._create_table",
        "airflow_broadway.staging.archive.table.sync_log",
        "airflow_broadway.staging.settling.settlement.record_settled",
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_settlement_killed_while_archiving_is_completed(world, monkeypatch, point, after):
    # Given a run that settles three messages, one of which comes again, and is killed
    world.send({"minute": 1}, {"minute": 61}, {"minute": 2, "fails": "batch"})
    run = world.run("killed")
    run.process()
    with monkeypatch.context() as patch:
        patch.setattr(point, killed(point, after=after))
        patch.setattr(RunWatcher, "settle_unwatched", lambda self: None)
        run.batch()
        with pytest.raises(KeyboardInterrupt):
            run.ack()
    world.over.add("killed")

    # When the next runs sweep, and handle the rest
    world.run("next").all()
    world.run("last").all()

    # Then every message is in the archive once
    assert look(world.archive).messages == 3
    world.run("again", of_minutes(0, 120)).all()
    assert sorted(world.rows("again")) == [1, 2, 61]
    assert world.depth()[:3] == (0, 0, 0)


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
def test_killed_backfill_is_retried_and_leaves_each_row_once(tmp_path, monkeypatch, point):
    world = World(tmp_path, Daily)
    world.send({"minute": 1}, {"minute": 2}, {"minute": 3, "fails": "process"})
    for run_id in ("live", "live2"):
        world.run(run_id).all()
    run = world.run("again", of_minutes(0, 60))
    monkeypatch.setattr(
        "airflow_broadway.runs.watch.RunWatcher.settle_unwatched", lambda self: None
    )

    def all_tasks():
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
    assert [letter.reason for letter in failures(world)].count("sour") >= 1
    assert report["totals"]["acked"] >= 2


def test_duplicate_message_is_read_once(tmp_path):
    # Given an archive by receipt, and a lease that lapsed: a broker delivers what it had settled
    world = World(tmp_path)
    for run_id, minute in (("one", 1), ("two", 1), ("three", 61)):
        with world.queue() as queue:
            queue.send([json.dumps({"minute": minute}).encode()])
        world.run(run_id).all()
    rename_messages(world, "same")

    # When an interval that has all of them is run again
    report = world.run("again", of_minutes(0, 120)).all()

    # Then it is there once: the first by its time
    assert report["totals"]["received"] == 1
    assert world.rows("again") == [1]


def rename_messages(world: World, key: str) -> None:
    """Give all archived messages one id, as delivered again."""
    table = DeltaTable(place_of(world))
    table.update(updates={"message_id": f"'{key}'", "redelivered": "true"})


def test_resent_dead_letter_is_read_under_its_last_id(world, monkeypatch):
    # Given a dead letter that is sent once more, and a message that says it was another one
    world.send({"minute": 1, "fails": "process"}, {"minute": 2})
    for _ in range(2):  # it has two attempts
        world.run("dead").all()
    with world.queue() as queue:
        [letter] = queue.dead_letters(limit=None)
        again, forged = queue.send([letter.body, b'{"minute": 3}'])
    world.run("taken").process()
    world.over.add("taken")
    [[[other, _]]] = [batch["rows"] for batch in world.sink("dead")]
    ids = {again: letter.message_id, forged: other}

    def sent_back_as(producer, message):
        return ids.get(message.message_id)

    monkeypatch.setattr(SqliteProducer, "sent_back_as", sent_back_as)
    world.run("live").all()
    assert look(world.archive).messages == 4

    # When the interval is read
    interval = of_minutes(0, 60).interval
    assert interval is not None
    listing = look(world.archive)
    rows = [row for table in tables(world.archive, listing, interval) for row in table.to_pylist()]

    # Then the same message is there once, in its last form; no other one is hidden
    assert [json.loads(row["payload"])["minute"] for row in rows] == [1, 2, 3]
    assert (rows[0]["message_id"], rows[0]["was"]) == (again, letter.message_id)
    # And where the later one was removed, but not all of its execution, the first is read again
    [gone] = listing.again
    place_of(world).joinpath(gone).unlink()
    rest = look(world.archive, interval)
    assert [sum(files.values()) for files in rest.hours.values()] == [2]
    assert sum(table.num_rows for table in tables(world.archive, rest, interval)) == 2
    with pytest.raises(StagingError, match="was removed while the interval was read"):
        list(tables(world.archive, listing, interval))
    purge(world.archive, Interval(NINE, NINE + timedelta(hours=1)))
    assert look(world.archive) == replace(rest, hours={}, lost=(), again=(), removed=(interval,))


def test_live_run_turned_into_backfill_reads_the_archive(world):
    world.live(1, 2, 61, run_id="day")

    report = world.run("day", of_minutes(0, 60)).all()

    assert balanced(report)["acked"] == 5
    assert report["source"]["kind"] == "archive"
    assert sorted(batch["source"] for batch in world.sink("day")) == ["archive", "live"]


def test_failed_live_run_turned_into_backfill_releases_its_messages(world):
    # Given an archive, and a scheduled run that failed after it had taken a message
    world.live(1, 2, run_id="before")
    world.minutes(3)
    world.run("day").process()

    # When Airflow reprocesses the failed interval
    report = world.run("day", of_minutes(0, 60)).all()

    # Then it reads the archive, and the message is in the queue again
    assert report["balanced"]
    assert report["source"]["kind"] == "archive"
    assert world.rows("day") == [1, 2]
    assert world.depth()[0] == 1
    world.run("next").all()
    assert world.rows("next") == [3]
    assert look(world.archive).messages == 3
