from __future__ import annotations

from operator import attrgetter

import pytest

from airflow_broadway.producers.kit.suspects import divide, portion_limit
from airflow_broadway.producers.rabbitmq.bundle import Held


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
