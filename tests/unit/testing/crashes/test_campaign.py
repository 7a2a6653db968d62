"""Selection of a share of the cases."""

from __future__ import annotations

from airflow_broadway.testing.crashes.campaign import _select_share
from airflow_broadway.testing.crashes.case import Case
from airflow_broadway.testing.crashes.points import Call, Fault, Injection, Point

FAULTS = (Fault.KILLED_BEFORE, Fault.KILLED_AFTER, Fault.ERROR)
CASES = [
    Case((Injection(Point("one/process/1", Call("create", str(number)), 1), fault),))
    for number in range(10)
    for fault in FAULTS
]


def test_successive_shares_cover_each_point_and_then_each_case() -> None:
    turns = [_select_share(CASES, 5, number) for number in range(6)]

    assert {case.injections[0].point.call.target for turn in turns[:2] for case in turn} == {
        str(number) for number in range(10)
    }
    assert sorted(map(str, (case for turn in turns for case in turn))) == sorted(map(str, CASES))


def test_a_share_is_deterministic() -> None:
    assert _select_share(CASES, 7, 3) == _select_share(list(CASES), 7, 3)
    assert _select_share(CASES, 5, 6) == _select_share(CASES, 5, 0)
    assert _select_share(CASES, 0, 6) == []
