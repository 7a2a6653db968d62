"""Sets of offsets as ranges: sorted, disjoint, each from its first offset to before its last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

Range = tuple[int, int]
Ranges = tuple[Range, ...]

#: Beyond every offset: the largest that Kafka can have, and one more.
FOREVER: Final = 1 << 63


def normal(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Sorts ranges, and merges those that touch or overlap."""
    made: list[Range] = []
    for low, high in sorted((low, high) for low, high in ranges if low < high):
        if made and low <= made[-1][1]:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def of_offsets(offsets: Iterable[int]) -> Ranges:
    """Returns the ranges of single offsets."""
    return normal((offset, offset + 1) for offset in offsets)


def union(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets that are in either."""
    return normal((*one, *other)) if one and other else one or other


def minus(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets that are in the first alone."""
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


def clip(ranges: Ranges, low: int, high: int) -> Ranges:
    """Returns the offsets from ``low`` to before ``high``."""
    return normal((max(low, a), min(high, b)) for a, b in ranges)


def contains(ranges: Ranges, offset: int) -> bool:
    """Whether an offset is among them."""
    place = bisect_right(ranges, (offset, FOREVER))
    return place > 0 and offset < ranges[place - 1][1]


def count(ranges: Ranges) -> int:
    """Counts offsets."""
    return sum(high - low for low, high in ranges)
