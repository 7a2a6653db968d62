"""Sets of offsets as ranges: sorted, disjoint, each from its first offset to before its last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

__all__ = [
    "FOREVER",
    "Range",
    "Ranges",
    "contains",
    "count",
    "intersection",
    "minus",
    "normal",
    "of_offsets",
    "union",
]

Range = tuple[int, int]
Ranges = tuple[Range, ...]

#: Beyond every offset: the largest that Kafka can have, and one more.
FOREVER = 1 << 63


def normal(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Ranges in any order, touching and overlapping ones too, as they are kept."""
    made: list[Range] = []
    for low, high in sorted((low, high) for low, high in ranges if low < high):
        if made and low <= made[-1][1]:
            if high > made[-1][1]:
                made[-1] = (made[-1][0], high)
        else:
            made.append((low, high))
    return tuple(made)


def of_offsets(offsets: Iterable[int]) -> Ranges:
    """Single offsets, in any order."""
    made: list[Range] = []
    low = high = -1
    for offset in sorted(offsets):
        if offset <= high:
            high = max(high, offset + 1)
            continue
        if low >= 0:
            made.append((low, high))
        low, high = offset, offset + 1
    if low >= 0:
        made.append((low, high))
    return tuple(made)


def union(one: Ranges, other: Ranges) -> Ranges:
    """What is in either."""
    if not one or not other:
        return one or other
    return normal((*one, *other))


def minus(one: Ranges, other: Ranges) -> Ranges:
    """What is in the first alone."""
    if not one or not other:
        return one
    made: list[Range] = []
    place, last = 0, len(other)
    for low, high in one:
        while place < last and other[place][1] <= low:
            place += 1
        at = place
        while at < last and other[at][0] < high:
            if low < other[at][0]:
                made.append((low, other[at][0]))
            low = max(low, other[at][1])
            at += 1
        if low < high:
            made.append((low, high))
    return tuple(made)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """What is in both."""
    made: list[Range] = []
    at, last = 0, len(other)
    for low, high in one:
        while at < last and other[at][1] <= low:
            at += 1
        place = at
        while place < last and other[place][0] < high:
            made.append((max(low, other[place][0]), min(high, other[place][1])))
            place += 1
    return tuple(made)


def contains(ranges: Ranges, offset: int) -> bool:
    """Whether an offset is among them."""
    place = bisect_right(ranges, (offset, FOREVER))
    return place > 0 and offset < ranges[place - 1][1]


def count(ranges: Ranges) -> int:
    """How many offsets there are."""
    return sum(high - low for low, high in ranges)
