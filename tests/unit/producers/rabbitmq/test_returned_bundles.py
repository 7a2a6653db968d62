from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.rabbitmq.bundle import Header, Held, pack
from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.returned_bundles import examine, portion_limit, split


def held(number: int, crashes: int = 0) -> Held:
    return Held(f"m{number}", 1, crashes, False, b"\0\0", b"\0\0", b"body")


def bundle(count: int, *, released: bool = False) -> bytes:
    header = Header(bundle="b1", generation="g1", queue="q", count=count, released=released)
    return pack(header, [held(number) for number in range(count)])


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(f"file://{tmp_path}", "q")


def test_an_open_generation_is_handled_again_and_marked(journal: Journal) -> None:
    read = examine(bundle(3), journal)

    assert read is not None
    assert [m.message_id for m in read.messages] == ["m0", "m1", "m2"]
    assert all(m.redelivered for m in read.messages)


@pytest.mark.parametrize("bundles", [None, ["b1"]])
def test_a_settled_bundle_is_dropped(journal: Journal, bundles: list[str] | None) -> None:
    journal.note_settled("g1", {}, bundles)

    assert examine(bundle(3), journal) is None


def test_the_report_of_a_settlement_is_read_once_for_a_bundle(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.note_settled("g1", {}, ["another"], messages={"m0": "ack"})
    inside, read = Journal._read, []

    def reading(self: Journal, name: str) -> dict[str, Any] | None:
        read.append(name)
        return inside(self, name)

    monkeypatch.setattr(Journal, "_read", reading)

    found = examine(bundle(3), journal)

    assert found is not None
    assert [m.message_id for m in found.messages] == ["m1", "m2"]
    assert [name.rpartition("/")[2] for name in read] == ["settled.json"]


def test_a_bundle_that_settling_never_saw_is_not_dropped(journal: Journal) -> None:
    journal.note_settled("g1", {}, ["another"])

    assert examine(bundle(3), journal) is not None


def test_a_released_bundle_is_never_dropped(journal: Journal) -> None:
    journal.note_settled("g1", {}, None)

    assert examine(bundle(3, released=True), journal) is not None


def test_what_was_settled_at_once_is_left_out(journal: Journal) -> None:
    journal.note_now("g1", {"m1": "ack"})

    read = examine(bundle(3), journal)

    assert read is not None
    assert [m.message_id for m in read.messages] == ["m0", "m2"]


def test_portions_shrink_with_crashes_down_to_one() -> None:
    assert [portion_limit(crashes, 5) for crashes in range(8)] == [
        None,
        None,
        10_000,
        1_000,
        100,
        10,
        1,
        1,
    ]


def test_suspects_are_alone_in_their_generation() -> None:
    messages = [held(number, crashes=4) for number in range(250)]

    assert split(messages, room=500, fresh=False, max_crashes=5) is None
    portion = split(messages, room=500, fresh=True, max_crashes=5)

    assert portion is not None
    assert (len(portion.take), len(portion.later), portion.alone) == (100, 150, True)


def test_one_crash_changes_nothing_yet() -> None:
    messages = [held(number, crashes=1) for number in range(250)]

    portion = split(messages, room=200, fresh=False, max_crashes=5)

    assert portion is not None
    assert (len(portion.take), len(portion.later), portion.alone) == (200, 50, False)


def test_only_who_crashed_alone_is_set_aside() -> None:
    messages = [held(1, crashes=7), held(2, crashes=6), held(3, crashes=6)]

    portion = split(messages, room=10, fresh=True, max_crashes=5)

    assert portion is not None
    assert [m.message_id for m in portion.crashed] == ["m1"]
    assert [m.message_id for m in portion.take] == ["m2"]
    assert [m.message_id for m in portion.later] == ["m3"]
