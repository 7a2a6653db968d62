from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.producers.kit.state_files import StateFiles
from airflow_broadway.producers.rabbitmq.bundle import Header, Held, pack
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.receive.returned import examine


def bundle(count: int, *, released: bool = False) -> bytes:
    header = Header(bundle="b1", generation="g1", queue="q", count=count, released=released)
    return pack(header, [Held(f"m{n}", 1, False, b"\0\0", b"\0\0", b"body") for n in range(count)])


@pytest.fixture
def journal(tmp_path: Path) -> QueueJournal:
    return QueueJournal(f"file://{tmp_path}", "q")


def test_an_open_generation_is_handled_again_and_marked(journal: QueueJournal) -> None:
    read = examine(bundle(3), journal)

    assert read is not None
    assert [m.message_id for m in read.messages] == ["m0", "m1", "m2"]
    assert all(m.redelivered for m in read.messages)


@pytest.mark.parametrize("bundles", [None, ["b1"]])
def test_a_settled_bundle_is_dropped(journal: QueueJournal, bundles: list[str] | None) -> None:
    journal.note_settled("g1", SettleReport(), bundles)

    assert examine(bundle(3), journal) is None


def test_the_report_of_a_settlement_is_read_once_for_a_bundle(
    journal: QueueJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.note_settled("g1", SettleReport(), ["another"], messages={"m0": Action.ACK})
    inside, read = StateFiles.read, []

    def reading(self: StateFiles, name: str) -> Any:
        read.append(name)
        return inside(self, name)

    monkeypatch.setattr(StateFiles, "read", reading)

    found = examine(bundle(3), journal)

    assert found is not None
    assert [m.message_id for m in found.messages] == ["m1", "m2"]
    assert [name.rpartition("/")[2] for name in read] == ["settled.json"]


def test_a_bundle_that_settling_never_saw_is_not_dropped(journal: QueueJournal) -> None:
    journal.note_settled("g1", SettleReport(), ["another"])

    assert examine(bundle(3), journal) is not None


def test_a_released_bundle_is_never_dropped(journal: QueueJournal) -> None:
    journal.note_settled("g1", SettleReport(), None)

    assert examine(bundle(3, released=True), journal) is not None


def test_what_was_settled_at_once_is_left_out(journal: QueueJournal) -> None:
    journal.note_now("g1", {"m1": Action.ACK})

    read = examine(bundle(3), journal)

    assert read is not None
    assert [m.message_id for m in read.messages] == ["m0", "m2"]
