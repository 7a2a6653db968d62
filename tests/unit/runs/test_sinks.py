"""Batchers with a sink: each message's rows are in it exactly once, whatever dies."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.dataset as ds
import pytest

from airflow_broadway import Batcher, BatchInfo, Message, Rows
from airflow_broadway.core.errors import BroadwayError, OptionsError, PipelineError, StagingDamaged
from airflow_broadway.core.formats.ownership import OwnershipLost
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.local.run import run_local
from airflow_broadway.core.model.connections import NoConnections
from airflow_broadway.core.model.sink import Commit, SinkClient, SinkEnv, SinkError, SinkWarning
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.sinks import Commits
from airflow_broadway.runs.tasks import BatchTask
from airflow_broadway.sinks import DeltaTable, ParquetFolder, PostgresTable
from airflow_broadway.sinks.parquet import _Disk
from airflow_broadway.staging.settling.settlement import begin_settlement
from tests.unit.runs.steps import Point, Run, Sums, balanced, dies, note, precede

COMMIT = "airflow_broadway.runs.sinks:Commits.commit"
RECORD = "airflow_broadway.core.formats.record_batch:BatchRecorder.record"
CREATE = "airflow_broadway.sinks.parquet:_Disk.create"


class Folder(Sums):
    """Commits the numbers; those divisible by 5 fail in the batch."""

    name = "Sums"
    batchers = {
        "default": Batcher(
            engine="python", batch_size=10, batch_timeout=None, sink=ParquetFolder(path="/replaced")
        )
    }

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        super().handle_batch(batcher, messages, batch_info, context)
        failed = [item.failed("five") for item in messages if item.data % 5 == 0]
        rows = [{"number": item.data} for item in messages if item.data % 5]
        return Rows(rows, failed=failed)


def make(folder: Path, run_id: str = "manual__1", **options: Any) -> Run:
    folder.mkdir(exist_ok=True)
    sink = {"sink": {"path": str(folder / "lake")}}
    options.setdefault("pipeline", Folder)
    return Run(folder, run_id, batchers={"default": sink}, **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = make(tmp_path)
    made.send(range(1, 26))
    return made


def numbers(run: Run) -> list[Any]:
    """The numbers in the folder, as a reader sees them who knows nothing of commits."""
    lake = run.folder / "lake"
    table = ds.dataset(lake).to_table() if lake.exists() else None
    found: list[Any] = table["number"].to_pylist() if table else []
    return sorted(found)


#: Of 1 to 25: without those that fail in the processor (7, 14, 21) or in the batch (5, 10, …).
GOOD = [item for item in range(1, 26) if item % 7 and item % 5]


def batch(run: Run, *pulled: Mapping[str, Any], try_number: int = 1) -> dict[str, int] | None:
    """The batcher's task, with all that it does before it runs batches."""
    task = replace(run.task(-1, try_number), task_id="batch.default")
    work = BatchTask(run.staged, run.pipeline, task, run.ports, batcher="default")
    plan = work.plan(pulled, label=str(try_number))
    return None if plan is None else work.handle(plan)


def after_death(run: Run) -> None:
    """Settle what a dead run left, and handle what comes again in another."""
    later = make(run.folder, "manual__2", finished=[run.run_id], create=False)
    batch(later, later.process())
    later.ack()


@pytest.mark.parametrize("pipeline", [Sums, Folder])
def test_undecodable_metadata_fails_no_message(tmp_path, monkeypatch, pipeline):
    monkeypatch.setattr("airflow_broadway.staging.batch_reader.load_metadata", {}.__getitem__)
    monkeypatch.setattr(
        pipeline, "handle_batch", lambda self, name, messages, *_: messages[0].metadata
    )
    run = (Run if pipeline is Sums else make)(tmp_path, numbers=[1, 2])

    keys_alone = r"the metadata \[queue, enqueued_at\] cannot be decoded\."
    with pytest.raises(StagingDamaged, match=keys_alone):
        batch(run, run.process())

    assert (balanced(run.ack())["released"], run.dead()) == (2, [])


def test_rows_are_committed_and_their_messages_settled(run: Run) -> None:
    batch(run, run.process())

    report = run.ack()

    assert numbers(run) == GOOD
    assert (report["totals"]["acked"], report["totals"]["dead_lettered"]) == (len(GOOD), 8)
    assert run.dead() == [5, 7, 10, 14, 15, 20, 21, 25]


@pytest.mark.parametrize(
    "point",
    [
        Point(COMMIT, "before", 2),
        Point(CREATE, "before", 2),
        Point(CREATE, "after", 2),
        Point("airflow_broadway.sinks.parquet:_Disk.publish", "after", 2),
        Point(COMMIT, "after", 2),
        Point(RECORD, "before", 2),
        Point(RECORD, "after", 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("retried", [True, False])
def test_no_row_is_lost_or_doubled_where_a_process_dies(
    run: Run, point: Point, retried: bool
) -> None:
    pulled = run.process()
    dies(lambda: batch(run, pulled), point)

    if retried:
        batch(run, pulled, try_number=2)
        run.ack()
    else:
        after_death(run)

    assert numbers(run) == GOOD
    assert run.dead() == [5, 7, 10, 14, 15, 20, 21, 25]
    assert run.depth() == (0, 0, 0, 8)


def test_a_batch_whose_commit_has_landed_is_not_handled_again(run: Run) -> None:
    pulled = run.process()
    dies(lambda: batch(run, pulled), Point(COMMIT, "after", 1))
    before = len(run.calls())

    counts = batch(run, pulled, try_number=2)

    # Then its messages that failed, fail as at the first try
    assert counts == {"batches": 3, "successful": len(GOOD), "failed": 5, "without_outcome": 0}
    assert max(Counter(call.number for call in run.calls()).values()) == 1
    assert before == 10


def test_a_paused_process_commits_nothing_once_its_messages_are_released(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that is paused immediately before it commits its first batch
    pulled = run.process()

    def swept(*_: Any) -> None:
        after_death(run)

    precede(monkeypatch, swept, Commits, "commit", once=True)

    counts = batch(run, pulled)

    # Then another run handles its messages, and its own commits are refused
    assert counts is not None
    assert counts["without_outcome"] == 3
    assert numbers(run) == GOOD


def test_the_commit_of_an_overlapping_try_stands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a try that is paused immediately before it commits, while a second one does all
    pulled = run.process()

    def overtaken(*_: Any) -> None:
        batch(run, pulled, try_number=2)

    precede(monkeypatch, overtaken, Commits, "commit", once=True)
    with suppress(OwnershipLost):  # if its check is no longer fresh
        batch(run, pulled)

    assert run.ack()["totals"]["acked"] == len(GOOD)
    assert numbers(run) == GOOD


def test_a_paused_try_commits_nothing_once_its_batch_has_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a try that is paused immediately before its first commit, while in a second one every
    # batch fails
    pulled = run.process()

    def refuse(*_: Any) -> Any:
        raise ValueError("no")

    def fail(*_: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "handle_batch", refuse)
            batch(run, pulled, try_number=2)

    precede(monkeypatch, fail, Commits, "commit", once=True)
    with suppress(OwnershipLost):
        batch(run, pulled)
    run.ack()

    # Then no row is of a message that failed
    assert numbers(run) == []
    assert len(run.dead()) == 25


@pytest.mark.parametrize("drops", [False, True])
def test_a_try_that_is_paused_while_it_records_a_failure_fails_nothing_that_was_committed(
    run: Run, monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    # Given a first try in which every batch fails, or has no outcome, paused immediately before it
    # records that, while a second one dies between its first commit and the outcome
    pulled = run.process()
    handle = Folder.handle_batch

    def refuse(*_: Any) -> Any:
        raise ValueError("no")

    def second(*_: Any) -> None:
        task = os.fork()
        if task:
            os.waitpid(task, 0)
            return
        own, commit = os.getpid(), Commits.commit

        def last(*args: Any) -> None:  # in a process of the task, which handles suspects
            commit(*args)
            os.kill(own, signal.SIGKILL)
            os._exit(9)

        monkeypatch.setattr(Folder, "handle_batch", handle)
        monkeypatch.setattr(Folder, "handle_failed", Pipeline.handle_failed)
        monkeypatch.setattr(Commits, "commit", last)
        batch(run, pulled, try_number=2)
        os._exit(1)

    monkeypatch.setattr(Folder, "handle_batch", refuse)
    if drops:
        monkeypatch.setattr(Folder, "handle_failed", lambda *_: [])
    precede(monkeypatch, second, BatchRecorder, "record", once=True)
    with suppress(OwnershipLost):
        batch(run, pulled)
    monkeypatch.undo()
    run.ack()
    after_death(run)

    # Then each message is either in the table, once, or dead
    assert not {*numbers(run)} & {*run.dead()}
    assert len(numbers(run)) == len({*numbers(run)})


class Poisoned(Folder):
    """Its process dies at the number 3, once a first try has handled it."""

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        again = Path(f"{context['calls']}.again")
        if again.exists() and any(item.data == 3 for item in messages):
            os._exit(9)
        again.touch()
        return super().handle_batch(batcher, messages, batch_info, context)


def test_a_paused_try_commits_nothing_once_its_batch_was_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a try that is paused immediately before its commit, while the processes of a second one
    # die at a message, so that the batch is split down to it
    run = make(tmp_path, pipeline=Poisoned)
    object.__setattr__(run.pipeline.producer, "max_crashes", 1)
    run.send([1, 2, 3, 4])
    pulled = run.process()

    def split(*_: Any) -> None:
        task = replace(run.task(-1, 2), task_id="batch.default", forks=True)
        work = BatchTask(run.staged, run.pipeline, task, run.ports, batcher="default")
        plan = work.plan([pulled], label="2")
        assert plan is not None
        work.handle(plan)

    precede(monkeypatch, split, Commits, "commit", once=True)
    with suppress(OwnershipLost):
        batch(run, pulled)
    run.ack()

    # Then each row is of one commit, and none is of the message that was dead-lettered
    assert numbers(run) == [1, 2, 4]
    assert run.dead() == [3]


def test_messages_do_not_fail_because_their_commit_is_ruled_out_while_it_is_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a commit whose files are removed after they were written, for another run rules it out
    def rule_out(disk: _Disk, folder: str) -> None:
        client = ParquetFolder(path=disk.root).open(SinkEnv())
        client.rule_out([folder.removeprefix("_staged/").rpartition("-")[0]])
        raise FileNotFoundError(folder)

    pulled = run.process()
    monkeypatch.setattr(_Disk, "sync", rule_out)

    counts = batch(run, pulled)

    assert counts == {"batches": 3, "successful": 0, "failed": 0, "without_outcome": 3}


@pytest.mark.parametrize("empty", [False, True])
def test_rows_that_spark_wrote_to_another_host_are_not_committed(
    tmp_path: Path, empty: bool
) -> None:
    # Given executors whose disk is not the driver's
    rows = Mock()
    rows.isEmpty.return_value = empty
    client = ParquetFolder(path=str(tmp_path)).open_spark(Mock(), SinkEnv())
    commit = Commit(commit_id="a.1", attempt=1, batch=None, pipeline="p")

    no_files = pytest.raises(SinkError, match=r"none of the files .* use a folder on a disk")
    with nullcontext() if empty else no_files:
        client.commit(rows, commit)

    assert client.landed(["a.1"]) == ({"a.1": 1} if empty else {})


def watched(run: Run, *pulled: Mapping[str, Any], try_number: int = 1) -> None:
    """The batcher's task of a run whose sensor looks after it, so that it does not settle."""
    with closing(run.watcher()) as watcher:
        watcher.heartbeat.beat()
    batch(run, *pulled, try_number=try_number)


def test_what_was_committed_before_a_settlement_began_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a sweep that reads plans and outcomes before the batcher's task plans, and goes on after
    pulled = run.process()
    calls: list[str] = []

    def late(*args: Any, **options: Any) -> bool:
        if not calls:
            calls.append("begin_settlement")
            watched(run, pulled)
        return begin_settlement(*args, **options)

    monkeypatch.setattr("airflow_broadway.runs.settle.begin_settlement", late)

    # When the process task is cleared
    batch(run, run.process(try_number=2), try_number=2)
    run.ack()

    assert calls
    assert numbers(run) == GOOD


def test_rows_of_other_process_tasks_stay_when_one_is_cleared(run: Run) -> None:
    # Given a run of two process tasks whose batches hold messages of both
    first = run.process(0, max_messages=13)
    second = run.process(1)
    watched(run, first, second)

    # When the first one and the batcher's task are cleared
    watched(run, run.process(0, try_number=2), second, try_number=2)
    run.ack()

    assert numbers(run) == GOOD
    assert run.depth()[:3] == (0, 0, 0)


def test_rows_stay_when_the_process_task_is_cleared(run: Run) -> None:
    # Given a run of which two of three batches are committed, one without an outcome
    pulled = run.process()
    dies(lambda: batch(run, pulled), Point(COMMIT, "after", 2))

    # When its process task is cleared, and receives what is released
    batch(run, run.process(try_number=2), try_number=2)
    run.ack()

    assert numbers(run) == GOOD
    assert run.depth()[:3] == (0, 0, 0)


def test_a_generation_stays_unsettled_while_its_sink_cannot_be_reached(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pulled = run.process()
    dies(lambda: batch(run, pulled), Point(COMMIT, "after", 1))

    def away(self: ParquetFolder, env: SinkEnv) -> SinkClient:
        raise SinkError("file:///lake: it is not there")

    with monkeypatch.context() as patch:
        patch.setattr(ParquetFolder, "open", away)
        with pytest.raises(SinkError, match="it is not there"):
            run.ack()
    assert run.depth()[2] == 25  # all of them leased
    assert "Could not settle generation" in caplog.text

    run.ack()

    after_death(run)
    assert numbers(run) == GOOD


def after_change(run: Run, sink: Any, run_id: str) -> Run:
    """Returns a run of the same pipeline after its batcher's sink was changed."""
    return Run(
        run.folder,
        run_id,
        pipeline=Folder,
        finished=[run.run_id],
        create=False,
        batchers={"default": {"sink": sink}},
    )


@pytest.mark.parametrize("sink", [{"path": "/elsewhere"}, None], ids=["moved", "removed"])
def test_batches_are_not_resolved_in_another_sink_than_they_were_planned_for(
    run: Run, sink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a commit that has landed without an outcome
    pulled = run.process()
    dies(lambda: batch(run, pulled), Point(COMMIT, "after", 1))

    # When the batcher has another sink
    changed = after_change(run, sink, run.run_id)
    planned = r"were planned for file://.*deploy the earlier pipeline"
    with pytest.raises(BroadwayError, match=planned):
        batch(changed, pulled, try_number=2)
    with pytest.raises(SinkError, match=planned):
        changed.ack()
    after_change(run, sink, "manual__2").process()

    # Then nothing is redelivered until it has its own again
    assert run.depth()[2] == 25
    run.ack()
    after_death(run)
    assert numbers(run) == GOOD


def test_batches_that_were_planned_without_a_sink_are_released_after_one_was_added(
    run: Run,
) -> None:
    without = after_change(run, None, run.run_id)
    plan = BatchTask(
        without.staged, without.pipeline, without.task(-1), without.ports, batcher="default"
    ).plan([pulled := run.process()], label="1")
    assert plan is not None

    with pytest.raises(SinkError, match="were planned for no sink"):
        batch(run, pulled)
    run.ack()

    assert run.depth() == (22, 0, 0, 3)


class Renamed(Folder):
    batchers = {"other": Folder.batchers["default"]}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return super().handle_message(processor, message, context).put_batcher("other")


def test_nothing_is_released_after_a_batcher_with_a_sink_was_renamed(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a commit that has landed without an outcome
    pulled = run.process()
    dies(lambda: batch(run, pulled), Point(COMMIT, "after", 1))

    # When the next run's pipeline has the batcher under another name
    later = Run(run.folder, "manual__2", pipeline=Renamed, finished=[run.run_id], create=False)
    later.process()

    # Then its sweep leaves the dead run to the earlier pipeline
    assert "deploy the earlier pipeline" in caplog.text
    assert run.depth()[2] == 25
    after_death(run)
    assert numbers(run) == GOOD


def test_a_ledger_is_a_part_of_where_commits_are_recorded() -> None:
    tables = [PostgresTable(table="a.b", ledger=ledger) for ledger in ("a.one", "a.two")]
    assert len({table.commits_uri for table in tables}) == 2
    assert len({table.uri for table in tables}) == 1


def test_a_failed_commit_fails_its_batch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: _Disk, folder: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_Disk, "sync", full)

    counts = batch(run, run.process())

    assert counts == {"batches": 3, "successful": 0, "failed": 22, "without_outcome": 0}
    run.ack()
    assert numbers(run) == []
    assert len(run.dead()) == 25


@pytest.mark.parametrize("number", range(8))
def test_a_folder_that_cannot_be_listed_loses_no_row(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    # Given a disk that fails once, at some listing of a staged commit
    pulled = run.process()
    listed, scandir = count(), os.scandir

    def failing(path: str) -> Any:
        if "_staged/" in str(path) and next(listed) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    batch(run, pulled)
    monkeypatch.undo()
    if run.depth()[2]:
        batch(run, pulled, try_number=2)
        run.ack()

    assert next(listed) > number
    assert Counter([*numbers(run), *run.dead()]) == Counter(range(1, 26))


def test_without_handle_batch_the_rows_are_the_data(tmp_path: Path) -> None:
    class Plain(Folder):
        batchers = {
            "default": Batcher(
                engine="python",
                schema="n bigint, note string",
                sink=ParquetFolder(path="/replaced", partition_by=["n"]),
            )
        }

        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message.put_data({"n": int(message.data)})

    Plain.handle_batch = Pipeline.handle_batch  # type: ignore[method-assign]
    run = make(tmp_path, pipeline=Plain)
    run.send([1, 2, 3])

    batch(run, run.process())
    run.ack()

    table = ds.dataset(run.folder / "lake", partitioning="hive").to_table()
    assert set(table["n"].to_pylist()) == {1, 2, 3}
    assert set(table.column_names) == {"message_id", "note", "n"}
    assert str(table.schema.field("note").type) == "string"


def test_run_local_commits_before_it_settles(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    leased: list[int] = []
    precede(monkeypatch, lambda *_: leased.append(run.depth()[2]), Commits, "commit")

    report = run.pipeline.run_local(connections=NoConnections())

    assert leased[0] >= 10
    assert report.settled.acked == len(GOOD)
    assert numbers(run) == GOOD


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda messages: messages, "a list of dicts or a pyarrow.Table"),
        (lambda messages: None, "a list of dicts or a pyarrow.Table"),
        (lambda messages: Rows([], failed=[Message(1)]), "takes messages of the batch"),
        (lambda messages: [{"number": 1}, {"number": "one"}], "the column 'number'"),
    ],
)
def test_what_handle_batch_may_not_return(
    run: Run, monkeypatch: pytest.MonkeyPatch, returned: Callable[[Any], Any], reason: str
) -> None:
    monkeypatch.setattr(
        Folder, "handle_batch", lambda self, batcher, messages, *_: returned(messages)
    )
    note(run.calls_path, [])

    batch(run, run.process())

    report = run.ack()
    assert report["totals"]["acked"] == 0
    assert any(reason in item["reason"] for item in report["reasons"])
    assert numbers(run) == []


def test_options_that_no_sink_takes() -> None:
    with pytest.raises(OptionsError, match=r"a sink, such as ParquetFolder"):
        Batcher(sink="s3://lake/orders")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="an absolute path or a URI"):
        ParquetFolder(path="lake")
    with pytest.raises(PipelineError, match="nothing commits the rows"):
        run_local(Folder(producer={"path": "/none"}))


@pytest.mark.parametrize(
    ("engine", "path", "warns"),
    [
        ("spark", "/lake/orders", True),
        ("spark", "abfss://lake@account.dfs.core.windows.net/orders", False),
        ("python", "/lake/orders", False),
    ],
)
def test_a_table_that_cannot_fence_is_warned_of_where_it_is_declared(
    engine: str, path: str, warns: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Batcher(engine=engine, schema="n bigint", sink=DeltaTable(path=path))
    assert [warning.category for warning in caught] == [SinkWarning] * warns
