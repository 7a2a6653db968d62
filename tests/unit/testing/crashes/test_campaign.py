"""The cases of a campaign that runs a share of them."""

from __future__ import annotations

from airflow_broadway.testing.crashes.campaign import _select_turn
from airflow_broadway.testing.crashes.case import Case
from airflow_broadway.testing.crashes.points import Call, Fault, Point, Strike

FAULTS = (Fault.KILLED_BEFORE, Fault.KILLED_AFTER, Fault.ERROR)
CASES = [
    Case((Strike(Point("one/process/1", Call("create", str(number)), 1), fault),))
    for number in range(10)
    for fault in FAULTS
]


def test_turns_cover_all_points_then_all_cases():
    turns = [_select_turn(CASES, 5, number) for number in range(6)]

    targets = {case.strikes[0].point.call.target for turn in turns[:2] for case in turn}
    assert targets == {str(number) for number in range(10)}
    assert sorted(map(str, (case for turn in turns for case in turn))) == sorted(map(str, CASES))


def test_turn_is_reproducible():
    assert _select_turn(CASES, 7, 3) == _select_turn(list(CASES), 7, 3)
    assert _select_turn(CASES, 5, 6) == _select_turn(CASES, 5, 0)
    assert _select_turn(CASES, 0, 6) == []
