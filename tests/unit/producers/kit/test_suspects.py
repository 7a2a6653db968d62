from __future__ import annotations

from datetime import UTC, datetime, timedelta
from operator import attrgetter

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.producers.kit.state_files import MemoryFiles
from airflow_broadway.producers.kit.suspects import Deaths, divide, dying, portion_limit
from airflow_broadway.producers.rabbitmq.bundle import Held

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def held(number: int, crashes: int) -> Held:
    return Held(f"m{number}", 1, crashes, False, b"\0\0", b"\0\0", b"body")


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

    assert divide(messages, attrgetter("crashes"), room=500, fresh=False, max_crashes=5) is None
    portion = divide(messages, attrgetter("crashes"), room=500, fresh=True, max_crashes=5)

    assert portion is not None
    assert (len(portion.take), len(portion.later), portion.alone) == (100, 150, True)


def test_one_crash_changes_nothing_yet() -> None:
    messages = [held(number, crashes=1) for number in range(250)]

    portion = divide(messages, attrgetter("crashes"), room=200, fresh=False, max_crashes=5)

    assert portion is not None
    assert (len(portion.take), len(portion.later), portion.alone) == (200, 50, False)


def test_only_who_crashed_alone_is_set_aside() -> None:
    messages = [held(1, crashes=7), held(2, crashes=6), held(3, crashes=6)]

    portion = divide(messages, attrgetter("crashes"), room=10, fresh=True, max_crashes=5)

    assert portion is not None
    assert [m.message_id for m in portion.crashed] == ["m1"]
    assert [m.message_id for m in portion.take] == ["m2"]
    assert [m.message_id for m in portion.later] == ["m3"]


def test_who_left_no_manifest_died_and_who_left_one_that_is_damaged_did_not() -> None:
    assert dying("g", Settlement(rest=RELEASE), lambda: ["a"]) == ["a"]
    assert dying("g", Settlement(rest=RELEASE, damaged=True), lambda: ["a"]) == []


def test_the_deaths_of_a_generation_are_counted_once_however_often_it_is_settled() -> None:
    files = MemoryFiles()
    for _ in range(9):  # each by another process
        Deaths(files, 1).count("g1", ["a", "b"], NOW)
    assert Deaths(files, 1).of(["b", "a"], NOW, 5) == {"b": 1, "a": 1}

    Deaths(files, 1).count("g2", ["a"], NOW)
    assert Deaths(files, 1).everything(NOW, 5) == {"a": 2, "b": 1}


def test_who_settles_two_generations_in_a_row_counts_both() -> None:
    files = MemoryFiles()
    one = Deaths(files, 1)
    one.count("g1", ["a"], NOW)
    one.count("g2", ["a"], NOW)

    assert Deaths(files, 1).of(["a"], NOW, 5) == {"a": 2}


@pytest.mark.parametrize("merged", [False, True])
def test_no_number_of_deaths_among_others_sets_a_message_aside(merged: bool) -> None:
    """Runs beside each other know of no suspects of the other, and options change."""
    files = MemoryFiles()
    for number in range(9):
        Deaths(files, 1).count(f"g{number}", ["a", "b"], NOW)
    if merged:
        Deaths(files, 1).everything(NOW, 5)
        assert len(files.names("deaths")) == 1
        Deaths(files, 1).count("g8", ["a", "b"], NOW)

    def crashed(max_crashes: int) -> list[str]:
        deaths = Deaths(files, 1).of(["a", "b"], NOW, max_crashes)
        portion = divide([*deaths], deaths.__getitem__, room=9, fresh=True, max_crashes=max_crashes)
        assert portion is not None
        assert len(portion.take) == 1
        return portion.crashed

    assert crashed(5) == crashed(1) == []

    Deaths(files, 1).count("alone", ["a"], NOW, alone=True)
    assert crashed(5) == crashed(1) == ["a"]
    Deaths(files, 1).count("again among others", ["a"], NOW)
    assert crashed(5) == []


def test_who_is_done_with_begins_anew() -> None:
    files = MemoryFiles()
    for number in range(7):
        Deaths(files, 1).count(f"g{number}", ["a"], NOW, alone=True)
    Deaths(files, 1).forget(["a", "never"], NOW)
    assert Deaths(files, 1).everything(NOW, 5) == Deaths(files, 1).of(["a"], NOW, 5) == {}

    Deaths(files, 1).count("g9", ["a"], NOW + timedelta(days=2))
    assert Deaths(files, 1).of(["a"], NOW, 5) == {"a": 1}
    # Also when nothing of its first life is known any more
    assert Deaths(files, 1).everything(NOW + timedelta(days=4), 5) == {"a": 1}


@pytest.mark.parametrize("poison", [0, 537, 999])
def test_a_message_among_a_thousand_is_alone_after_34_runs_at_most(poison: int) -> None:
    deaths = dict.fromkeys(range(1_000), 0)
    runs = 0
    while True:
        runs += 1
        suspects = sorted(deaths, key=lambda each: (-deaths[each], each))
        portion = divide(
            suspects, deaths.__getitem__, room=len(suspects), fresh=True, max_crashes=5
        )
        assert portion is not None
        if portion.crashed:
            break
        if poison in portion.take:
            for each in portion.take:
                deaths[each] += 1
        else:
            for each in portion.take:
                del deaths[each]
    assert portion.crashed == [poison]
    assert runs <= 35  # the one that sets it aside included
    assert runs == 35 or poison != 999
