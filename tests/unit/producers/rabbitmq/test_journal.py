"""The journal of generations, written by concurrent processes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, is_swept

NOW = datetime(2026, 11, 26, tzinfo=UTC)


def test_concurrent_settlers_see_each_other(tmp_path, monkeypatch):
    # Given a settlement that another overtakes just before it records its turn
    one, other = (QueueJournal(f"file://{tmp_path}", "q") for _ in range(2))
    write, overtaken = one._files.write, []

    def overtake(name: str, value: Any) -> None:
        overtaken.append(other.note_turn("g", whole=True))
        write(name, value)

    monkeypatch.setattr(one._files, "write", overtake)

    first = one.note_turn("g", whole=True)

    # Then both turns stand, and messages published by one of them are marked as repeated
    [second] = overtaken
    assert other.turns("g") == {first[0], second[0]}
    assert first[1] or second[1]


def test_full_settlement_knows_earlier_turns(tmp_path):
    journal = QueueJournal(f"file://{tmp_path}", "q")

    assert journal.note_turn("g", whole=False)[1] is False
    assert journal.note_turn("g", whole=True)[1] is False
    assert journal.note_turn("g", whole=True)[1] is True
    assert journal.note_turn("g", whole=False)[1] is False
    assert journal.note_turn("other", whole=True)[1] is False
    assert len(journal.turns("g")) == 4


def test_closed_swept_or_settled_generation_is_over(tmp_path):
    journal = QueueJournal(f"file://{tmp_path}", "q")
    journal.note_opened("open", "broadway.held.q.0", NOW)
    journal.note_closed("closed", NOW)
    journal.note_swept("swept")
    journal.note_settled("settled", SettleReport(), None)

    assert is_swept(journal.note_settled("swept", SettleReport(acked=1), None))
    assert not is_swept(journal.note_swept("settled"))
    assert journal.opened("open") == "broadway.held.q.0"
    over = [key for key in ("open", "closed", "swept", "settled") if journal.is_over(key)]
    assert over == ["closed", "swept", "settled"]


def test_renamed_pipeline_reads_same_journal(tmp_path):
    shared = f"file://{tmp_path}/shared"
    one, other = (QueueJournal(f"file://{tmp_path}/{n}", "q", shared) for n in "ab")
    one.log_of("g").note_now({"m1": Action.ACK})
    one.note_type(1000.0)

    assert other.log_of("g").now() == {"m1": Action.ACK}
    assert not other.seen_type(1000.0)


def test_journal_outlives_lease_by_a_week(tmp_path):
    journal = QueueJournal(f"file://{tmp_path}", "q")
    journal.note_opened("g", "broadway.held.q.0", NOW)

    journal.forget(NOW + timedelta(days=7))
    assert journal.opened("g") == "broadway.held.q.0"
    journal.forget(NOW + timedelta(days=8))

    assert journal.opened("g") is None
    assert list(tmp_path.rglob("*.json")) == []
