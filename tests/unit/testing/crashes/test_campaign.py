"""Which cases a campaign strikes when it strikes a share of them."""

from __future__ import annotations

from airflow_broadway.testing.crashes.campaign import _select_turn
from airflow_broadway.testing.crashes.case import Case
from airflow_broadway.testing.crashes.points import Call, Fault, Point, Strike

WHATS = (Fault.KILLED_BEFORE, Fault.KILLED_AFTER, Fault.ERROR)
CASES = [
    Case((Strike(Point("one/process/1", Call("create", str(number)), 1), what),))
    for number in range(10)
    for what in WHATS
]


def test_the_turn_comes_to_each_point_and_then_to_each_case() -> None:
    turns = [_select_turn(CASES, 5, number) for number in range(6)]

    assert {case.strikes[0].point.call.target for turn in turns[:2] for case in turn} == {
        str(number) for number in range(10)
    }
    assert sorted(map(str, (case for turn in turns for case in turn))) == sorted(map(str, CASES))


def test_a_turn_is_the_same_whenever_it_is_taken() -> None:
    assert _select_turn(CASES, 7, 3) == _select_turn(list(CASES), 7, 3)
    assert _select_turn(CASES, 5, 6) == _select_turn(CASES, 5, 0)
    assert _select_turn(CASES, 0, 6) == []
