"""Messages that come again although a sink has their rows are acknowledged, and not handled."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.model.sink import SinkClient, SinkEnv, SinkError
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.sinks import Commits
from airflow_broadway.sinks import ParquetFolder
from airflow_broadway.staging.applied import KEPT, AppliedIndex, note_applied
from airflow_broadway.staging.run_folder import PUBLISHED, SETTLED
from airflow_broadway.staging.store import Store
from tests.unit.runs.steps import Point, Run, Sums, balanced, dies, precede
from tests.unit.runs.test_sinks import GOOD, batch, make, numbers

NOTE = "airflow_broadway.runs.settle.note_applied"
SETTLE = "airflow_broadway.producers.sqlite.queue:SqliteQueue.settle"
JOURNAL = "airflow_broadway.staging.settling.settlement.record_settled"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = make(tmp_path)
    made.send(range(1, 26))
    return made


def handle(run: Run, pulled: Mapping[str, Any]) -> None:
    """The batcher's task of a run whose sensor looks after it, so that it does not settle."""
    with closing(run.watcher()) as watcher:
        watcher.heartbeat.beat()
    batch(run, pulled)


def lapse(run: Run) -> None:
    """The leases of all messages lapse, at the broker and by the record of this run."""
    past = SystemClock().now() - timedelta(seconds=1)
    for record in run.staged.generations():
        run.staged.put_lease(replace(run.staged.lease(record), deadline=past))
    with closing(sqlite3.connect(run.folder / "queue.db")) as db, db:
        db.execute("UPDATE leases SET deadline = 0")


def after(run: Run, run_id: str = "manual__2", finished: Sequence[str] = ()) -> Run:
    return make(run.folder, run_id, create=False, finished=finished)


def index(run: Run) -> list[str]:
    folder = run.folder / "staging" / "Sums" / "_applied"
    files = sorted(folder.iterdir()) if folder.exists() else []
    return [key for file in files for key in json.loads(file.read_text())["messages"]]


def test_messages_of_a_lapsed_lease_are_not_handled_again(run: Run) -> None:
    # Given a run whose batches are committed, and whose leases lapse before it settles
    handle(run, run.process())
    lapse(run)

    # When another run receives all messages
    later = after(run)
    batch(later, later.process())
    totals = balanced(later.ack())

    # Then only those whose rows are not in the table are handled
    assert numbers(run) == GOOD
    assert (totals["received"], totals["already_applied"]) == (25, len(GOOD))
    assert totals["acked"] == len(GOOD)
    assert run.dead() == [5, 7, 10, 14, 15, 20, 21, 25]
    assert len(index(run)) == len(GOOD)
    assert balanced(run.ack())["lapsed"] == 25


def test_only_messages_that_come_again_are_in_the_index(run: Run) -> None:
    # Given a dead run, one batch of which is committed, and whose lease has not lapsed
    pulled = run.process()
    dies(lambda: batch(run, pulled), Point("airflow_broadway.runs.sinks:Commits.commit", "after"))

    # When another run settles it, and handles what was released
    later = after(run, finished=["manual__1"])
    batch(later, later.process())
    totals = balanced(later.ack())

    assert numbers(run) == GOOD
    assert index(run) == []
    assert "already_applied" not in totals


def test_a_paused_batcher_commits_nothing_once_its_messages_came_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a batcher of a run that goes on, paused before its second commit until its lease has
    # lapsed and another run has handled all messages
    pulled = run.process()
    reports = []

    commits = count(1)

    def overtake(*_: object) -> None:
        if next(commits) == 2:
            lapse(run)
            later = after(run)
            handle(later, later.process())
            reports.append(balanced(later.ack()))

    precede(monkeypatch, overtake, Commits, "commit")
    handle(run, pulled)
    run.ack()

    # Then its first batch counts, and its second one is refused
    assert numbers(run) == GOOD
    assert reports[0]["already_applied"] == len([item for item in GOOD if item <= 11])
    assert run.depth() == (0, 0, 0, 8)


@pytest.mark.parametrize(
    "point",
    [
        Point(SETTLE, "before"),
        Point(SETTLE, "after"),
        Point(NOTE, "before"),
        Point(NOTE, "after"),
        Point(JOURNAL, "before"),
        Point(JOURNAL, "after"),
    ],
    ids=str,
)
@pytest.mark.parametrize("settled_by", ["its sensor", "a later run"])
def test_no_row_is_doubled_where_the_settlement_of_a_lapsed_run_dies(
    run: Run, point: Point, settled_by: str
) -> None:
    handle(run, run.process())
    lapse(run)
    if settled_by == "its sensor":
        with run.queue() as queue:  # another receiver holds them meanwhile
            assert len(queue.receive("another", 25)) == 25
        dies(run.ack, point)
        lapse(run)
    else:
        dies(after(run).process, point)

    later = after(run, "manual__3", finished=["manual__1", "manual__2"])
    batch(later, later.process())
    later.ack()

    assert numbers(run) == GOOD
    assert run.depth() == (0, 0, 0, 8)


def test_nothing_is_handled_while_the_sink_of_a_lapsed_run_cannot_be_reached(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = run.process()
    dies(lambda: batch(run, pulled), Point("airflow_broadway.runs.sinks:Commits.commit", "after"))
    lapse(run)

    def away(self: ParquetFolder, env: SinkEnv) -> SinkClient:
        raise SinkError("file:///lake: it is not there")

    with monkeypatch.context() as patch:
        patch.setattr(ParquetFolder, "open", away)
        with pytest.raises(SinkError, match="it is not there"):
            after(run).process()
    assert run.depth() == (25, 0, 0, 0)

    later = after(run, "manual__3", finished=["manual__2"])
    batch(later, later.process())
    later.ack()
    assert numbers(run) == GOOD
    assert run.depth() == (0, 0, 0, 8)


def test_a_fresh_message_is_handled_whatever_its_id(run: Run) -> None:
    # Given the ids of new messages in the index
    with run.queue() as queue:
        ids = [message.message_id for message in queue.receive("look", 25)]
        queue.release("look")
    with closing(sqlite3.connect(run.folder / "queue.db")) as db, db:
        db.execute("UPDATE messages SET deliveries = 0")
    note_applied(run.staged.store, "Sums", "g", ids, *[SystemClock().now()] * 2)

    batch(run, run.process())
    run.ack()

    assert numbers(run) == GOOD


def test_an_id_that_is_used_again_by_a_later_message_is_handled(run: Run) -> None:
    # Given redelivered messages that were sent after a generation with the same ids was received
    with run.queue() as queue:
        ids = [message.message_id for message in queue.receive("look", 25)]
        queue.release("look")
    now = SystemClock().now()
    note_applied(run.staged.store, "Sums", "g", ids, now, now - timedelta(hours=1))

    batch(run, run.process())
    run.ack()

    assert numbers(run) == GOOD


def test_a_settlement_that_has_released_applied_messages_is_completed_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a settlement that releases committed messages, as those behind a failed one of their
    # group, and dies before they are in the index; the lease has not lapsed
    pulled = run.process()
    handle(run, pulled)
    real = SqliteQueue.settle

    def release(self: Any, generation: str, *args: Any, **options: Any) -> SettleReport:
        if generation != pulled["generation"]:
            return real(self, generation, *args, **options)
        real(self, generation, Settlement(rest=RELEASE))
        return SettleReport(released=25, again=ComingAgain(all_but=True))

    monkeypatch.setattr(SqliteQueue, "settle", release)
    dies(run.ack, Point(NOTE, "before"))

    # When another run receives them
    later = after(run)
    batch(later, later.process())
    later.ack()

    assert numbers(run) == GOOD


def test_a_lapsed_generation_whose_manifest_is_damaged_stops_no_run(run: Run) -> None:
    pulled = run.process()
    lapse(run)
    generation = pulled["generation"]
    [file] = (run.folder / "staging").rglob(f"{generation}/manifest.json")
    file.write_text("{")

    assert after(run).process()["received"] == 25
    assert run.staged.state(generation) == SETTLED


def test_lapsed_generations_of_another_queue_are_not_settled(run: Run, tmp_path: Path) -> None:
    # Given a run of the same pipeline with another queue, whose lease has lapsed
    handle(run, run.process())
    lapse(run)

    # When a run receives redelivered messages
    other = make(tmp_path / "other", "manual__2", store=run.staged.store)
    other.send(range(1, 26))
    with other.queue() as queue:
        queue.receive("look", 25)
        queue.release("look")
    batch(other, other.process())
    other.ack()

    assert numbers(other) == GOOD
    assert {record.state for record in run.staged.generations()} == {PUBLISHED}


def test_a_run_without_redelivered_messages_reads_no_index(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_applied(run.staged.store, "Sums", "g", ["a"], *[SystemClock().now()] * 2)
    monkeypatch.setattr(AppliedIndex, "read_new", lambda *_: pytest.fail("it was read"))

    assert run.process()["received"] == 25


def test_a_pipeline_without_sinks_reads_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, pipeline=Sums, numbers=range(1, 26))
    run.process()
    lapse(run)
    monkeypatch.setattr(AppliedIndex, "read_new", lambda *_: pytest.fail("it was read"))

    later = Run(tmp_path, "manual__2", pipeline=Sums, create=False)

    assert later.process()["received"] == 25


def test_old_files_of_the_index_are_removed(tmp_path: Path) -> None:
    store = Store.open(f"file://{tmp_path}/staging")
    now = SystemClock().now()
    note_applied(store, "Sums", "old", ["a"], now - KEPT - timedelta(seconds=1), now)
    note_applied(store, "Sums", "new", ["b"], now - KEPT + timedelta(seconds=1), now)
    note_applied(store, "Sums", "new", ["c"], now, now)

    index = AppliedIndex(store, "Sums")
    index.read_new(now)

    assert [index.has(key) for key in "abc"] == [False, True, False]
    assert len(list((tmp_path / "staging" / "Sums" / "_applied").iterdir())) == 1


def test_a_damaged_index_stops_the_run(run: Run) -> None:
    handle(run, run.process())
    lapse(run)
    note_applied(run.staged.store, "Sums", "g", ["a"], *[SystemClock().now()] * 2)
    [file] = (run.folder / "staging" / "Sums" / "_applied").iterdir()
    file.write_text("{")

    with pytest.raises(StagingDamaged, match="_applied"):
        after(run).process()

    assert run.depth()[0] == 25
