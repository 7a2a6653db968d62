"""A breadth-first search through all states of a model: the first bad one has the shortest trace.

A model's states are hashable values.  If a step affects only its own thread, the model marks it,
and the search follows that step alone: taking others' steps first leads to the same states later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Step(NamedTuple, Generic[S]):
    """One atomic action.

    :param name: Thread and action, for readers: the last word before the colon names a function.
    :param state: The state after it.
    :param alone: The thread, if the step changes only what no other reads, and can be taken at any
        time; else empty.
    """

    name: str
    state: S
    alone: str = ""


class Model(Protocol[S]):
    """A system that can be explored."""

    def start(self) -> S: ...

    def steps(self, state: S) -> Sequence[Step[S]]:
        """Returns all possible next steps."""
        ...

    def violation(self, state: S) -> str:
        """Returns the promise that the state breaks; empty if none."""
        ...


class StateLimitExceeded(Exception):
    """The search has more states than its limit."""


@dataclass(frozen=True)
class Violation(Generic[S]):
    """A broken promise, and the shortest trace to it."""

    promise: str
    trace: Sequence[str]
    state: S

    def __str__(self) -> str:
        steps = "\n".join(f"{number:3}. {name}" for number, name in enumerate(self.trace, 1))
        return f"{self.promise}\n{steps}\n{self.state}"


@dataclass(frozen=True)
class SearchResult(Generic[S]):
    """The result of a search.

    :param depth: The number of steps to the state that is furthest away.
    """

    states: int
    steps: int
    depth: int
    broken: Violation[S] | None


def explore(
    model: Model[S],
    *,
    max_states: int,
    then: Callable[[S], tuple[str, Sequence[str]] | None] = lambda state: None,
) -> SearchResult[S]:
    """Visits every reachable state, nearest first, until one breaks a promise.

    :param max_states: States to visit, at most.
    :param then: Continues from each state without a violation: returns the promise that is broken
        after it, and the steps; ``None`` if none is.
    :raises StateLimitExceeded: If there are more states.
    """
    start = model.start()
    previous: dict[S, tuple[S, str] | None] = {start: None}
    level, depth, count = [start], 0, 0
    while level:
        next_level: list[S] = []
        for state in level:
            promise = model.violation(state)
            later = None if promise else then(state)
            if promise or later is not None:
                promise, more = later or (promise, ())
                trace = [*_trace(previous, state), *more]
                return SearchResult(len(previous), count, depth, Violation(promise, trace, state))
            steps = model.steps(state)
            alone = next((step.alone for step in steps if step.alone), "")
            for step in steps:
                if step.alone != alone:
                    continue
                count += 1
                if step.state not in previous:
                    previous[step.state] = state, step.name
                    next_level.append(step.state)
        if len(previous) > max_states:
            text = f"more than {max_states:,} states: {len(previous):,} at depth {depth}"
            raise StateLimitExceeded(text)
        level = next_level
        depth += bool(next_level)
    return SearchResult(len(previous), count, depth, None)


def _trace(previous: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    names: list[str] = []
    while (before := previous[state]) is not None:
        state, name = before
        names.append(name)
    return names[::-1]
