"""The journal of lease queues, when two processes write it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.rabbitmq.journal import QueueJournal


def test_of_two_who_settle_at_once_one_knows_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a settlement that another overtakes just before it notes its turn
    one, other = (QueueJournal(f"file://{tmp_path}", "q") for _ in range(2))
    write, overtaken = one.files.write, []

    def overtake(name: str, value: Any) -> None:
        overtaken.append(other.note_turn("g", whole=True))
        write(name, value)

    monkeypatch.setattr(one.files, "write", overtake)

    first = one.note_turn("g", whole=True)

    # Then both turns stand, and what one of the two publishes is marked as a repetition
    [second] = overtaken
    assert other.turns("g") == {first[0], second[0]}
    assert first[1] or second[1]


def test_a_turn_that_settles_the_whole_knows_those_before(tmp_path: Path) -> None:
    journal = QueueJournal(f"file://{tmp_path}", "q")

    assert journal.note_turn("g", whole=False)[1] is False
    assert journal.note_turn("g", whole=True)[1] is False
    assert journal.note_turn("g", whole=True)[1] is True
    assert journal.note_turn("g", whole=False)[1] is False
    assert journal.note_turn("other", whole=True)[1] is False
    assert len(journal.turns("g")) == 4
