"""Ranges are sets of offsets: each function is compared with Python's own sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.producers.kafka import ranges
from airflow_broadway.producers.kafka.ranges import Ranges

offsets = st.sets(st.integers(0, 40))


def whole(given: Ranges) -> set[int]:
    assert given == ranges.normal(given), "sorted, disjoint, none that touch"
    return {offset for low, high in given for offset in range(low, high)}


@given(offsets, offsets)
def test_ranges_are_sets(one: set[int], other: set[int]) -> None:
    a, b = ranges.of_offsets(one), ranges.of_offsets(other)

    assert whole(a) == one
    assert whole(ranges.union(a, b)) == one | other
    assert whole(ranges.minus(a, b)) == one - other
    assert whole(ranges.intersection(a, b)) == one & other
    assert ranges.count(a) == len(one)
    assert {each for each in range(41) if ranges.contains(a, each)} == one


def test_the_end_of_a_log_is_open() -> None:
    log = ((5, ranges.FOREVER),)

    assert ranges.minus(log, ((7, 9),)) == ((5, 7), (9, ranges.FOREVER))
    assert ranges.intersection(log, ((0, 6), (100, 200))) == ((5, 6), (100, 200))
    assert ranges.contains(log, 10**15)
