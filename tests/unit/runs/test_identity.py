"""Copies of one message, by its identity: its rows are committed once."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import deltalake
import pytest

from airflow_broadway import Archive, RetryPolicy
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.staging.applied import WINDOW, AppliedIndex, Claims, note_applied
from airflow_broadway.staging.store import Store
from tests.unit.runs.steps import Point, Run, balanced, dies
from tests.unit.runs.test_applied import handle, lapse
from tests.unit.runs.test_sinks import Folder, batch, make, numbers


class ByHeader(Folder):
    """Its messages have their identity in a header."""

    producer = SqliteProducer(
        queue="sums",
        path="/replaced",
        retry=RetryPolicy(max_attempts=1),
        message_identity="header:key",
    )


class NoIds(SqliteProducer):
    """As a broker that assigns no ids: copies are looked for among redelivered messages."""

    assigns_ids = False

    def identity_of(self, message: Any) -> str | None:
        key = self.header_of(message, "key")
        return None if key is None else f"={key}"


class WithoutIds(Folder):
    producer = NoIds(queue="sums", path="/replaced", retry=RetryPolicy(max_attempts=1))


def started(
    folder: Path, number: int = 1, pipeline: Any = ByHeader, *, over: Iterable[int] = ()
) -> Run:
    finished = [f"manual__{item}" for item in over]
    return make(
        folder, f"manual__{number}", pipeline=pipeline, create=number == 1, finished=finished
    )


def send(run: Run, *numbers: int, key: str | None = "n") -> None:
    """Sends a message for each number, with its identity."""
    with run.queue() as queue:
        queue.send([(b"%d" % n, None if key is None else {"key": f"{key}{n}"}) for n in numbers])


def redeliver(run: Run) -> None:
    """Marks all messages as redelivered."""
    generation = uuid.uuid4().hex
    with run.queue() as queue:
        queue.receive(generation, 100)
        queue.release(generation)


def settled(run: Run, *pulled: Mapping[str, Any]) -> dict[str, Any]:
    handle(run, *pulled)
    report = run.ack()
    balanced(report)
    return report


def counts(report: Mapping[str, Any]) -> tuple[int, int, int]:
    totals = report["totals"]
    return tuple(
        totals.get(name, 0) for name in ("already_applied", "duplicates", "without_identity")
    )


@pytest.mark.parametrize("pipeline", [ByHeader, WithoutIds])
def test_copies_in_one_run_are_handled_once_and_settled_together(
    tmp_path: Path, pipeline: Any
) -> None:
    # Given copies of messages, of which 5 fails in the batch and 7 before it
    run = started(tmp_path, pipeline=pipeline)
    send(run, *[1, 2, 5, 7] * 2, 1)
    redeliver(run)

    report = settled(run, run.process())

    assert numbers(run) == [1, 2]
    assert run.dead() == [5, 7]
    assert run.depth() == (0, 0, 0, 2)
    assert report["totals"]["acked"] == 7
    assert counts(report) == (0, 5, 0)
    assert any("copies of others" in line for line in lines_of(report))


@pytest.mark.parametrize(
    ("pipeline", "marked", "rows"),
    [
        (ByHeader, True, [1, 2, 3]),
        (ByHeader, False, [1, 2, 3]),
        (WithoutIds, True, [1, 2, 3]),
        (WithoutIds, False, [1, 2, 2, 3]),
    ],
)
def test_a_copy_in_a_later_run_is_acknowledged(
    tmp_path: Path, pipeline: Any, marked: bool, rows: list[int]
) -> None:
    first = started(tmp_path, pipeline=pipeline)
    send(first, 1, 2)
    if marked:
        redeliver(first)
    settled(first, first.process())

    later = started(tmp_path, 2, pipeline)
    send(later, 2, 3)
    if marked:
        redeliver(later)
    report = settled(later, later.process())

    assert numbers(later) == rows
    assert counts(report) == (5 - len(rows) - 1, 0, 0)
    assert later.depth() == (0, 0, 0, 0)


def archived(run: Run) -> list[int]:
    table = deltalake.DeltaTable(run.folder / "staging" / "Sums" / "_archive")
    payloads: list[Any] = table.to_pyarrow_table()["payload"].to_pylist()
    return sorted(map(int, payloads))


@pytest.mark.parametrize("pipeline", [ByHeader, WithoutIds])
def test_a_copy_that_is_acknowledged_unhandled_is_not_archived(
    tmp_path: Path, pipeline: Any
) -> None:
    # Given a run that receives copies, and a later one that receives another, all of one message
    kept = type("Kept", (pipeline,), {"archive": Archive(), "__module__": __name__})
    first = started(tmp_path, pipeline=kept)
    send(first, 1, 2, 2)
    redeliver(first)
    settled(first, first.process())
    later = started(tmp_path, 2, kept)
    send(later, 2, 3)
    redeliver(later)
    settled(later, later.process())

    assert numbers(later) == [1, 2, 3]
    assert archived(later) == [1, 2, 3]


def test_a_message_that_comes_again_is_archived_once_although_it_is_not_handled(
    tmp_path: Path,
) -> None:
    # Given a run whose lease lapses after its commit, so that it has archived nothing
    kept = type("Kept", (ByHeader,), {"archive": Archive(), "__module__": __name__})
    first = started(tmp_path, pipeline=kept)
    send(first, 1, 2)
    redeliver(first)
    handle(first, first.process())
    lapse(first)

    # When the messages come again, and a copy of one
    later = started(tmp_path, 2, kept)
    send(later, 2)
    redeliver(later)
    report = settled(later, later.process())
    first.ack()

    assert counts(report)[0] == 3
    assert numbers(later) == [1, 2]
    assert archived(later) == [1, 2]


@pytest.mark.parametrize("pipeline", [ByHeader, WithoutIds])
@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_waits_while_an_unsettled_run_holds_the_other(
    tmp_path: Path, pipeline: Any, fails: bool
) -> None:
    # Given a run that holds a message
    number = 5 if fails else 2
    first = started(tmp_path, pipeline=pipeline)
    send(first, number)
    redeliver(first)
    pulled = first.process()

    # When others receive its copy, before and after that is settled
    second = started(tmp_path, 2, pipeline)
    send(second, number, 3)
    redeliver(second)
    report = settled(second, second.process())
    assert (report["totals"]["released"], report["totals"]["acked"]) == (1, 1)
    settled(first, pulled)
    third = started(tmp_path, 3, pipeline)
    settled(third, third.process())

    # Then it is settled by the outcome of the first
    assert numbers(third) == ([3] if fails else [2, 3])
    assert third.dead() == ([5, 5] if fails else [])
    assert third.depth()[0] == 0


def test_a_copy_of_a_message_that_a_dead_run_held_is_handled(tmp_path: Path) -> None:
    # Given runs whose process and whose batcher die: of the first nothing is committed
    first = started(tmp_path)
    send(first, 1, 2)
    dies(first.process, Point("airflow_broadway.runs.process:ChunkStager.stage", "before"))
    second = started(tmp_path, 2)
    send(second, 3, 4)
    pulled = second.process()
    dies(
        lambda: batch(second, pulled), Point("airflow_broadway.runs.sinks:Commits.commit", "after")
    )

    # When another receives copies of their messages
    later = started(tmp_path, 3, over=[1, 2])
    send(later, 1, 3)
    report = settled(later, later.process())

    assert numbers(later) == [1, 2, 3, 4]
    assert later.depth() == (0, 0, 0, 0)
    assert counts(report) == (1, 1, 0)


def test_a_run_that_released_a_copy_holds_back_no_other(tmp_path: Path) -> None:
    # Given two unsettled runs, the second of which has released its copy
    first = started(tmp_path)
    send(first, 1)
    pulled = first.process()
    second = started(tmp_path, 2)
    send(second, 1, 2)
    second.process()
    settled(first, pulled)

    # When the copy comes again, and the first has been settled without the row
    [index] = (tmp_path / "staging" / "Sums" / "_applied").glob("*.json")
    index.unlink()
    third = started(tmp_path, 3)
    send(third, 1)
    settled(third, third.process())

    assert numbers(third) == [1, 1]


def test_of_two_runs_that_claim_at_the_same_time_one_sees_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started(tmp_path)
    send(first, 1, 1)
    pulled: list[Any] = []
    add = Claims.add

    def overtaken(self: Claims, *claims: Any) -> None:
        add(self, *claims)
        monkeypatch.setattr(Claims, "add", add)
        pulled.append(second.process())

    second = started(tmp_path, 2)
    monkeypatch.setattr(Claims, "add", overtaken)
    pulled.insert(0, first.process(max_messages=1))
    for run, reference in zip((first, second), pulled, strict=True):
        settled(run, reference)
    third = started(tmp_path, 3)
    settled(third, third.process())

    assert numbers(third) == [1]
    assert third.depth() == (0, 0, 0, 0)


def test_redelivered_messages_without_an_identity_are_handled_and_counted(tmp_path: Path) -> None:
    run = started(tmp_path, pipeline=WithoutIds)
    send(run, 1, 1, key=None)
    redeliver(run)
    send(run, 2, key=None)

    report = settled(run, run.process())

    assert numbers(run) == [1, 1, 2]
    assert counts(report) == (0, 0, 2)
    assert any("2 messages without an identity" in line for line in lines_of(report))


def test_a_lapsed_message_is_found_by_its_identity_as_well(tmp_path: Path) -> None:
    first = started(tmp_path)
    send(first, 1, 2)
    handle(first, first.process())
    lapse(first)

    later = started(tmp_path, 2)
    send(later, 1)
    report = settled(later, later.process())

    assert numbers(later) == [1, 2]
    assert counts(report) == (3, 0, 0)


def test_nothing_is_claimed_or_read_for_fresh_messages_of_a_broker_without_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path, pipeline=WithoutIds)
    send(run, 1, 2)
    monkeypatch.setattr(Claims, "add", lambda *_: pytest.fail("it was claimed"))
    monkeypatch.setattr(AppliedIndex, "read_new", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(NoIds, "identity_of", lambda *_: pytest.fail("it was looked at"))

    settled(run, run.process())

    assert numbers(run) == [1, 2]
    assert not (tmp_path / "staging" / "Sums" / "_applied").exists()


def test_identities_of_fresh_messages_are_kept_for_a_shorter_time(tmp_path: Path) -> None:
    store, now = Store.open(f"file://{tmp_path}/staging"), SystemClock().now()
    for age, generation in ((timedelta(seconds=1), "old"), (-timedelta(seconds=1), "new")):
        for sent in (False, True):
            at = now - WINDOW - age
            note_applied(store, "Sums", generation, [f"{generation} {sent}"], at, at, sent=sent)

    index = AppliedIndex(store, "Sums")
    index.read_new(now)

    found = [index.has(f"{name} {sent}") for name in ("old", "new") for sent in (False, True)]
    assert found == [True, False, True, True]


def test_claims_of_settled_runs_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "staging" / "Sums" / "_applied" / "claims"
    for number in (1, 2, 3):
        run = started(tmp_path, number)
        send(run, number)
        settled(run, run.process())

    assert len(list(folder.iterdir())) == 1
