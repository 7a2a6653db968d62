"""The search itself, on a model that can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.model.checker import StateLimitExceeded, Step, explore


class Jugs:
    """A jug of three and one of five litres: four are to be measured, which the model forbids."""

    def __init__(self, forbidden: int = 4) -> None:
        self.forbidden = forbidden

    def start(self) -> tuple[int, int]:
        return 0, 0

    def steps(self, state: tuple[int, int]) -> Sequence[Step[tuple[int, int]]]:
        three, five = state
        over, back = min(three, 5 - five), min(five, 3 - three)
        return [
            Step("fill three", (3, five)),
            Step("fill five", (three, 5)),
            Step("empty three", (0, five)),
            Step("empty five", (three, 0)),
            Step("three into five", (three - over, five + over)),
            Step("five into three", (three + back, five - back)),
        ]

    def violation(self, state: tuple[int, int]) -> str:
        return f"{self.forbidden} litres" if self.forbidden in state else ""


def test_the_shortest_trace_is_shown():
    broken = explore(Jugs(), max_states=100).broken

    assert broken is not None
    assert (broken.promise, broken.state) == ("4 litres", (3, 4))
    assert str(broken).splitlines()[1:-1] == [
        "  1. fill five",
        "  2. five into three",
        "  3. empty three",
        "  4. five into three",
        "  5. fill five",
        "  6. five into three",
    ]


def test_all_states_are_explored():
    result = explore(Jugs(forbidden=6), max_states=100)

    assert result.broken is None
    assert (result.states, result.depth) == (16, 7)


def test_the_trace_includes_the_final_checks():
    def then(state: tuple[int, int]) -> tuple[str, Sequence[str]] | None:
        return ("five is full", ["look"]) if state[1] == 5 else None

    broken = explore(Jugs(), max_states=100, then=then).broken

    assert broken is not None
    assert (broken.promise, broken.trace) == ("five is full", ["fill five", "look"])


def test_an_independent_step_is_taken_alone():
    class Two(Jugs):
        def steps(self, state: tuple[int, int]) -> Sequence[Step[tuple[int, int]]]:
            first, second = state
            own = [Step("own", (first + 1, second), "one")] if first < 9 else []
            return [*own, *([Step("other", (first, second + 1))] if second < 9 else [])]

    result = explore(Two(forbidden=-1), max_states=100)

    assert (result.states, result.steps) == (19, 18)


def test_too_many_states_are_an_error():
    with pytest.raises(StateLimitExceeded):
        explore(Jugs(forbidden=6), max_states=10)
